"""FFCV: a beton file of JPEGs that its writer encodes anew; its own operators, compiled, in threads of one process.

It has neither Rotate nor ChannelDropout: its job "problem" is resizing alone, and so less work than the others'.

(none)   at random from the page cache, for a set that fits into memory
quasi    pages of the file in random order into memory of its own, for one that doesn't
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.fields.rgb_image import ResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from protocol import MEAN, STD, Options, Plan, main, rows
from sides import SIDES


class Pictures:
    """The pictures, decoded, as its writer takes them."""

    def __init__(self, found: list[tuple[Path, int]]) -> None:
        self._rows = found

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> tuple[np.ndarray, int]:
        path, label = self._rows[at]
        return cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB), label


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write one file with as many processes as cores."""
    out.mkdir()
    # Its writer bounds the longer side: of pictures of 4:3 as many pixels as the others' shorter side gives.
    side = math.ceil(plan.short_side * 4 / 3) if plan.short_side else None
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90, max_resolution=side), "label": IntField()}
    DatasetWriter(str(out / "train.beton"), fields).from_indexed_dataset(Pictures(rows(photos)))


class WholePicture(ResizedCropRGBImageDecoder):
    """Resizes the whole picture."""

    scale, ratio = (0.0, 1.0), (0.0, 1.0)  # the compiler wants arrays, and nothing uses them

    @property
    def get_crop_generator(self) -> Callable:
        """Return what says where the crop lies."""
        return lambda height, width, _scale, _ratio: (0, 0, height, width)


def read(options: Options) -> Iterator[Iterator]:
    """Yield the loader for each epoch."""
    size = (SIDES[options.job],) * 2
    decode = [WholePicture(size)] if options.job == "problem" else [RandomResizedCropRGBImageDecoder(size), RandomHorizontalFlip()]
    mean, std = (255 * np.array(values) for values in (MEAN, STD))
    quasi = options.variant == "quasi"
    loader = Loader(
        str(Path(options.folder) / "train.beton"),
        batch_size=options.batch,
        num_workers=options.workers,
        order=OrderOption.QUASI_RANDOM if quasi else OrderOption.RANDOM,
        os_cache=not quasi,
        drop_last=False,
        pipelines={
            "image": [*decode, NormalizeImage(mean, std, np.float32), ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    for _ in range(options.epochs):
        # Normalizing gives a whole batch where the last one is short.
        yield ((images[: len(labels)], labels) for images, labels in loader)


if __name__ == "__main__":
    main(write, read)
