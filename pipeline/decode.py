"""Turns a sample's bytes into an RGB uint8 picture and an integer label, decoding no more than it needs.

This is the reading side's door to cv2. Pictures are turned upright by their EXIF orientation, alpha is dropped, grey becomes RGB:
what `cv2.imread(path)` gives, as RGB. How many pixels a picture has is read from its header before any is decoded, so what `probe`
doesn't know isn't decoded either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.errors import DecodeError
from pipeline.items import OnFault, Sample, Sides, Wanted
from shardify.errors import FormatError
from shardify.format.picture import PIXEL_LIMIT, jpeg_sides, probe

Image = npt.NDArray[np.uint8]

_CURE_PICTURE = "`shardify verify --decode` lists all such samples: leave them out and pack again"
_CURE = "name another field by LoaderOptions(label=...), or pack again"
_SILENT = 0  # of cv2's log levels
_LABEL_LIMIT = 2**63
_SHOWN = 40  # characters of a label that is none
_DIGITS = 4300  # Python converts no longer text to an integer


# By the scale that libjpeg computes in the DCT.
_RGB = cv2.IMREAD_COLOR_RGB - cv2.IMREAD_COLOR
_FLAGS = {
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_REDUCED_COLOR_2 + _RGB,
    4: cv2.IMREAD_REDUCED_COLOR_4 + _RGB,
    8: cv2.IMREAD_REDUCED_COLOR_8 + _RGB,
}


def set_up_worker() -> None:
    """Keep cv2 to the calling thread, as workers are the parallelism, and from saying on stderr what an error says anyway.

    0 threads, not 1: in a process forked from one that used cv2's threads, 1 waits for ever for threads that the fork left behind.
    """
    cv2.setNumThreads(0)
    for module in (cv2, getattr(cv2.utils, "logging", None)):  # OpenCV 4 has it here, 5 there
        getattr(module, "setLogLevel", lambda level: None)(_SILENT)


def decode_image(data: bytes | memoryview, target: Sides | None = None, most_pixels: int = PIXEL_LIMIT) -> Image:
    """Return a picture as uint8 (height, width, 3), RGB.

    With `target` (height, width) a JPEG is decoded at 1/2, 1/4 or 1/8 where the result still has the target's size or more.
    One of more than `most_pixels` isn't decoded. Raises DecodeError with the reason; the caller adds the place.
    """
    if target is None:
        return _decoded(data, 1, most_pixels)
    sides = _reducible(data, target, turned=target[0] != target[1])
    return _decoded(data, 1 if sides is None else _scale(sides, target), most_pixels)


def decode_for_crop(
    data: bytes | memoryview, target: Sides, crop: Callable[[Sides], Sides], most_pixels: int = PIXEL_LIMIT
) -> tuple[Image, Sides | None]:
    """Return a picture of which a part is resized to `target`, and its sides where it was decoded at a scale, else None.

    `crop` tells the part's height and width for the whole picture's; the part has the target's size or more at that scale.
    Raises DecodeError as `decode_image` does.
    """
    sides = _reducible(data, target, turned=True)
    scale = 1 if sides is None else _scale(crop(sides), target)
    picture = _decoded(data, scale, most_pixels)
    if sides is None or scale == 1:
        return picture, None
    # OpenCV turned it: where EXIF is odd, otherwise than its header was read here.
    height, width, *_ = picture.shape
    return picture, sides if (height < width) == (sides[0] < sides[1]) else sides[::-1]


def _decoded(data: bytes | memoryview, scale: int, most_pixels: int) -> Image:
    _refuse_bomb(data, most_pixels)
    try:
        picture = cv2.imdecode(np.frombuffer(data, np.uint8), _FLAGS[scale])
    except cv2.error as error:
        raise DecodeError(f"OpenCV refused it: {' '.join(str(error).split())[-200:]}") from error
    if picture is None:
        raise DecodeError(_why(data))
    return picture  # type: ignore[return-value]


def _refuse_bomb(data: bytes | memoryview, most_pixels: int) -> None:
    """Raise DecodeError for more pixels than may be decoded, and for what doesn't say how many it has."""
    sides = jpeg_sides(data) if bytes(data[:2]) == b"\xff\xd8" else None
    if sides is None:
        try:
            picture = probe(bytes(data))
        except FormatError as error:
            raise DecodeError(str(error)) from error
        sides = picture.height, picture.width
    if sides[0] * sides[1] > most_pixels:
        raise DecodeError(f"it has {sides[1]}x{sides[0]} pixels; LoaderOptions(max_pixels={most_pixels}) allows no more")


def _reducible(data: bytes | memoryview, target: Sides, *, turned: bool) -> Sides | None:
    """Return the sides of a JPEG, None where half of them are less than the target's, or it is none; `turned`: as it is shown."""
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    sides = jpeg_sides(data)
    if sides is not None and not (max(sides) >= 2 * max(target) and min(sides) >= 2 * min(target)):
        return None  # whichever way up
    if sides is not None and not turned:
        return sides
    try:
        picture = probe(bytes(data))
    except FormatError:
        return None
    # Orientations 5 to 8 swap the sides of the upright picture.
    return (picture.width, picture.height) if picture.orientation >= 5 else (picture.height, picture.width)


def _scale(sides: Sides, target: Sides) -> int:
    """Return by how much sides may be divided, and be no less than the target's."""
    return next((scale for scale in (8, 4, 2) if sides[0] >= target[0] * scale and sides[1] >= target[1] * scale), 1)


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
        text = text.removesuffix(b"\n")  # `echo 5` writes a line's end too
        if not text.isdigit() or len(text) > _DIGITS or (value := int(text)) >= _LABEL_LIMIT:
            raise DecodeError(f"the label is {text[:_SHOWN]!r}, not an ASCII integer from 0 to 2^63 - 1")
        return value
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the json can't be read ({error})") from error
    got = found.get(name) if isinstance(found, dict) else None
    if isinstance(got, bool) or not isinstance(got, int) or not -_LABEL_LIMIT <= got < _LABEL_LIMIT:
        raise DecodeError(f"the json's {name!r} is {repr(got)[:_SHOWN]}, not an integer")
    return got


def decode(
    samples: Iterable[Sample],
    *,
    wanted: Wanted,
    target: Sides | None,
    fault: OnFault,
    crops: Callable[[Sample], Callable[[Sides], Sides]] | None = None,
) -> Iterator[Sample]:
    """Turn each raw sample into one with "image", a picture (its bytes unless `wanted.pixels`), and "label", an integer or None.

    `crops`: tells of a sample how large a part will be resized to `target`; then "__sides__" has the sides of a picture that was
    decoded at a scale. `fault` is given a DecodeError with the sample's shard, offset, key and field.
    """
    for raw in samples:
        field = next(name for name in wanted.image if name in raw)
        sample = {name: raw[name] for name in ("__key__", "__url__", "__occurrence__", "__place__")}
        try:
            if target is not None and crops is not None:
                sample["image"], sides = decode_for_crop(raw[field], target, crops(sample), wanted.most_pixels)
                if sides is not None:
                    sample["__sides__"] = sides
            else:
                sample["image"] = decode_image(raw[field], target, wanted.most_pixels) if wanted.pixels else raw[field]
            field = wanted.label or field
            sample["label"] = None if wanted.label is None else parse_label(raw[field], wanted.label_name)
        except DecodeError as error:
            of_label = field == wanted.label
            raised = DecodeError(
                f"{raw['__url__']} at byte {raw['__offset__']}: sample {raw['__key__']!r}, {field}: {error}; "
                f"{_CURE if of_label else _CURE_PICTURE}"
            )
            raised.__cause__ = error
            fault(raised, raw["__place__"], "label" if of_label else "picture")
            continue
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
