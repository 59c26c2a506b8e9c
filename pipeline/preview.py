"""Draws a contact sheet of an epoch's first pictures, raw beside augmented, with key and class under each.

The augmented ones are what a training run with the same seed sees in that epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.augment import Augmenter, augment, prepare
from pipeline.decode import decode_image, fit, to_png, write_text
from pipeline.errors import DecodeError, OptionsError, TransformError
from pipeline.loader import make_loader
from pipeline.options import LoaderOptions
from pipeline.urls import resolve

Image = npt.NDArray[np.uint8]

_SIDE = 160  # pixels of a picture's longer side
_GAP = 8
_CAPTION = 34
_LETTERS = 22  # of a caption's line over one picture


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample of the sheet: its raw and augmented pictures (uint8 RGB), its key and its class."""

    raw: Image
    augmented: Image
    key: str
    label: str


def contact_sheet(
    shards: Any,
    *,
    count: int = 16,
    transform: Callable[..., Any] | None = None,
    seed: int = 0,
    epoch: int = 0,
    split: str | None = None,
) -> bytes:
    """Return a PNG of the first `count` samples of an epoch, each raw beside augmented.

    Raises PipelineError for shards, samples or a transform that can't be used.
    """
    if count < 1:
        raise OptionsError(f"count={count}: 1 or more")
    return to_png(_sheet(list(_samples(shards, count, transform, seed, epoch, split))))


def _samples(shards: Any, count: int, transform: Any, seed: int, epoch: int, split: str | None) -> Iterator[Shown]:
    # A few samples of local shards aren't worth a process that reads ahead; remote ones nobody else fetches.
    remote = bool(resolve(shards, split=split).shards[0].url)
    options = LoaderOptions(decode="none", keys=True, last_batch="uneven", split=split, prefetch=remote)
    prepared = prepare(transform)
    augmenter = Augmenter(prepared.apply, isolated=True) if prepared.apply is not None else None
    with make_loader(shards, batch_size=count, num_workers=0, seed=seed, options=options) as loader:
        loader.set_epoch(epoch)
        for data, label, key in zip(*next(iter(loader)), strict=True):
            raw = _decoded(data, key)
            sample = {"__key__": key, "__url__": "preview", "__occurrence__": 0, "__place__": 0, "image": raw.copy()}
            if augmenter is not None:
                (sample,) = augment([sample], augmenter=augmenter, seed=seed, epoch=epoch, fault=_raise)
            made = sample["image"]
            name = str(int(label)) if loader.classes is None else f"{int(label)}: {loader.classes[int(label)]}"
            yield Shown(raw, _showable(made, key), key, name)


def _raise(error: Exception, _place: int, _cause: str) -> None:
    raise error


def _decoded(data: bytes, key: str) -> Image:
    try:
        return decode_image(data)
    except DecodeError as error:
        raise DecodeError(f"sample {key!r}: {error}") from error


def _showable(picture: Any, key: str) -> Image:
    """Return what a transform gave as uint8 (H, W, 3); floats are stretched from their least to their greatest value."""
    array = np.asarray(picture)
    if type(picture).__name__ == "Tensor" and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise TransformError(
            f"sample {key!r}: the transform gave {array.dtype} {array.shape}, which is no picture of 1 or 3 channels"
        )
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        array = ((array - low) * (255 / (high - low or 1))).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def _sheet(shown: Sequence[Shown]) -> Image:
    """Lay the samples out in as square a grid as their number allows."""
    columns = max(1, round(len(shown) ** 0.5 * 0.8))
    rows = -(-len(shown) // columns)
    width, height = 2 * _SIDE + 3 * _GAP, _SIDE + _CAPTION + _GAP
    sheet = np.full((rows * height + _GAP, columns * width + _GAP, 3), 255, np.uint8)
    for i, sample in enumerate(shown):
        top, left = i // columns * height + _GAP, i % columns * width + _GAP
        for picture, at in ((sample.raw, left), (sample.augmented, left + _SIDE + _GAP)):
            small = fit(picture, _SIDE)
            sheet[top : top + small.shape[0], at : at + small.shape[1]] = small
        write_text(sheet, sample.key[: 2 * _LETTERS], left, top + _SIDE + 13)
        write_text(sheet, sample.label[: 2 * _LETTERS], left, top + _SIDE + 28)
    return sheet
