"""Turns a sample's bytes into an RGB uint8 picture and an integer label, decoding no more than it needs.

This is the reading side's door to cv2. Pictures are turned upright by their EXIF orientation, alpha is dropped, grey becomes RGB:
what `cv2.imread(path)` gives, as RGB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.errors import DecodeError
from pipeline.items import Sample, Wanted
from shardify.errors import FormatError
from shardify.format.picture import jpeg_sides, probe

Image = npt.NDArray[np.uint8]

_CURE_PICTURE = "`shardify verify --decode` lists all such samples: leave them out and pack again"
_CURE = "name another field by LoaderOptions(label=...), or pack again"
_LABEL_LIMIT = 2**63
_DIGITS = 4300  # Python converts no longer text to an integer


# The scales that libjpeg computes in the DCT, largest first.
_REDUCED = ((8, cv2.IMREAD_REDUCED_COLOR_8), (4, cv2.IMREAD_REDUCED_COLOR_4), (2, cv2.IMREAD_REDUCED_COLOR_2))


def use_one_thread() -> None:
    """Keep cv2 to the calling thread: workers are the parallelism.

    0, not 1: in a process forked from one that used cv2's threads, 1 waits for ever for threads that the fork left behind.
    """
    cv2.setNumThreads(0)


def decode_image(data: bytes | memoryview, target: tuple[int, int] | None = None) -> Image:
    """Return a picture as uint8 (height, width, 3), RGB.

    With `target` (height, width) a JPEG is decoded at 1/2, 1/4 or 1/8 where the result still has the target's size or more.
    Raises DecodeError with the reason; the caller adds the place.
    """
    if len(data) == 0:
        raise DecodeError("the file is empty")
    try:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), _flags(data, target))
    except cv2.error as error:
        raise DecodeError(f"OpenCV refused it: {' '.join(str(error).split())[-200:]}") from error
    if picture is None:
        raise DecodeError(_why(data))
    return picture  # type: ignore[return-value]


def _flags(data: bytes | memoryview, target: tuple[int, int] | None) -> int:
    if target is None or bytes(data[:2]) != b"\xff\xd8":
        return cv2.IMREAD_COLOR_RGB
    sides = jpeg_sides(data)
    if sides is not None and not (max(sides) >= 2 * max(target) and min(sides) >= 2 * min(target)):
        return cv2.IMREAD_COLOR_RGB  # whichever way up
    if sides is None or target[0] != target[1]:
        try:
            picture = probe(bytes(data))
        except FormatError:
            return cv2.IMREAD_COLOR_RGB
        # Orientations 5 to 8 swap the sides of the upright picture.
        sides = (picture.width, picture.height) if picture.orientation >= 5 else (picture.height, picture.width)
    height, width = sides
    for scale, flag in _REDUCED:
        if height >= target[0] * scale and width >= target[1] * scale:
            return flag - cv2.IMREAD_COLOR + cv2.IMREAD_COLOR_RGB
    return cv2.IMREAD_COLOR_RGB


def _why(data: bytes | memoryview) -> str:
    """Say why OpenCV gave no picture, from the bytes alone."""
    try:
        picture = probe(bytes(data))
    except FormatError as error:
        return str(error)
    if picture.kind == "jpeg" and b"\xff\xd9" not in bytes(data[-64:]):
        return f"a JPEG of {len(data)} bytes that was cut (no end marker)"
    return f"this OpenCV ({cv2.__version__}) can't decode this {picture.kind} of {picture.width}x{picture.height}"


def parse_label(data: bytes | memoryview, name: str | None) -> int:
    """Return the label that a field holds: an ASCII integer, or with `name` an integer of that name in a json object.

    Raises DecodeError with the reason; the caller adds the place.
    """
    text = bytes(data)
    if name is None:
        if not text.isdigit() or len(text) > _DIGITS or (value := int(text)) >= _LABEL_LIMIT:
            raise DecodeError(f"the label is {text[:40]!r}, not an ASCII integer from 0 to 2^63 - 1")
        return value
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DecodeError(f"the json can't be read ({error})") from error
    got = found.get(name) if isinstance(found, dict) else None
    if isinstance(got, bool) or not isinstance(got, int) or not -_LABEL_LIMIT <= got < _LABEL_LIMIT:
        raise DecodeError(f"the json's {name!r} is {got!r}, not an integer")
    return got


def decode(samples: Iterable[Sample], *, wanted: Wanted, target: tuple[int, int] | None) -> Iterator[Sample]:
    """Turn each raw sample into one with "image", a picture (its bytes unless `wanted.pixels`), and "label", an integer or None.

    Raises DecodeError with the sample's shard, offset, key and field.
    """
    for raw in samples:
        field = next(name for name in wanted.image if name in raw)
        sample = {name: raw[name] for name in ("__key__", "__url__", "__occurrence__", "__place__")}
        try:
            sample["image"] = decode_image(raw[field], target) if wanted.pixels else raw[field]
            field = wanted.label or field
            sample["label"] = None if wanted.label is None else parse_label(raw[field], wanted.label_name)
        except DecodeError as error:
            raise DecodeError(
                f"{raw['__url__']} at byte {raw['__offset__']}: sample {raw['__key__']!r}, {field}: {error}; "
                f"{_CURE if field == wanted.label else _CURE_PICTURE}"
            ) from error
        yield sample


def fit(picture: Image, side: int) -> Image:
    """Return a picture shrunk so that both sides are at most `side`."""
    scale = side / max(picture.shape[:2])
    if scale >= 1:
        return picture
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    return cv2.resize(picture, size, interpolation=cv2.INTER_AREA)  # type: ignore[return-value]


def write_text(picture: Image, text: str, left: int, bottom: int) -> None:
    """Write one line of dark text into a picture; what isn't ASCII becomes "?" (cv2's fonts have nothing else)."""
    shown = text.encode("ascii", "replace").decode()
    cv2.putText(picture, shown, (left, bottom), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (40, 40, 40), 1, cv2.LINE_AA)


def to_png(picture: Image) -> bytes:
    """Return an RGB picture as PNG."""
    done, data = cv2.imencode(".png", picture[..., ::-1])
    assert done
    return data.tobytes()
