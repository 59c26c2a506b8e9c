"""All that `make_loader`'s eight arguments don't say: frozen, keyword-only, checked at birth."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pipeline.errors import OptionsError
from shardify.format.picture import PIXEL_LIMIT

if TYPE_CHECKING:
    from pipeline.stores.http import HttpOptions
    from pipeline.stores.objects import ObjectOptions

Decode = Literal["full", "auto", "none"]
Dtype = Literal["float32", "float16", "bfloat16", "uint8"]
LastBatch = Literal["drop", "pad", "uneven"]
OnError = Literal["raise", "skip"]
StartMethod = Literal["fork", "forkserver", "spawn"]

MAX_LANES = 64
MAX_CONNECTIONS = 64
_MOST_BYTES = 2**60
_MOST_PIXELS = 2**30  # OpenCV decodes no more
_SEED_LIMIT = 2**64 - 1
_ELSEWHERE = dict.fromkeys(
    ("batch_size", "transform", "num_workers", "shuffle", "seed", "device"), " (it is an argument of make_loader)"
) | {"drop_last": " (it is last_batch='drop' or 'uneven')"}
_DECODE, _DTYPE, _LAST_BATCH, _START = get_args(Decode), get_args(Dtype), get_args(LastBatch), get_args(StartMethod)
_ON_ERROR = get_args(OnError)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """Options of a loader; each has a default that fits most training, and the reason for it.

    split: the split of a folder that holds several (None: it must hold one).
    classes: the class names that labels must count by, as `train.classes`; a set with another mapping is an error.
    keys: batches are `KeyedBatch`, with the samples' keys.
    image: the fields that hold a picture, the first that a sample has, as "jpg;jpeg;png;webp".
    label: the field with the class index, "cls", or "json:name" for a number in the json; None for no labels.
    decode: "full" decodes whole pictures; "auto" decodes JPEGs at 1/2, 1/4 or 1/8 where the transform begins with a `Resize` to
        half the picture or less, or with a `RandomResizedCrop` whose crop is twice as large as its result; "none" yields the
        files' bytes and takes no transform.
    dtype: "float32"; "float16" or "bfloat16", the same values rounded; or "uint8" for the bytes as augmented, without normalizing.
    last_batch: what becomes of the samples that don't fill a last batch: "drop" (default when shuffling: left out, others each
        epoch), "pad" (filled up from the epoch's start), "uneven" (default otherwise: a short batch).
    on_error: what a sample costs that can't be read, decoded or transformed: "raise" ends the epoch; "skip" lets the nearest good
        one of its batch stand in for it, under another draw, and counts it (`loader.stats().skipped`).
    max_pixels: how many pixels a picture may have, by its header, to be decoded: it takes 3 bytes each in each worker.
    max_skipped: how much of an epoch may be skipped before that is an error: a count of samples, or as a float a share of them.
    lanes: streams that are read side by side and mixed into each batch, 1 to 64.
    window_bytes: bytes of a lane within which samples are shuffled.
    prefetch_factor: batches that each worker makes ahead.
    multiprocessing_context: how workers start: "fork", "forkserver", "spawn" (None: Python's default).
    persistent_workers: keep the workers from epoch to epoch.
    timeout: seconds to wait for a batch from the workers before that is an error; 0: for ever.
    ahead: batches that the trainer fetches before it works on one: 1 for trainers that look ahead for the last one, else 0;
        `state_dict` then leaves out what was fetched only.
    rank, world_size: this process among those that share the set (None: as torch.distributed or RANK and WORLD_SIZE say).
    prefetch: read local shards ahead in a process of its own.
    keep_bytes: how much of local shards stays in memory from epoch to epoch (None: what is available); remote ones stay in
        the cache folder, by `cache_bytes`.
    http: how servers of remote shards are asked, as `pipeline.HttpOptions(token=..., origin=...)` (None: the defaults).
    objects: how object stores are asked, as `pipeline.ObjectOptions(endpoint=...)` (None: as the environment says).
    cache_dir: the folder that remote shards are fetched into (None: the user's cache folder); one in memory needs no disk.
    cache_bytes: how much that folder may hold (None: half of what is free, at most 64 GiB).
    connections: ranges of remote shards that are fetched at once.
    """

    split: str | None = None
    classes: Sequence[str] | None = None
    keys: bool = False
    image: str = "jpg;jpeg;png;webp"
    label: str | None = "cls"
    decode: Decode = "full"  # equal to plain decoding, pixel for pixel
    dtype: Dtype = "float32"
    last_batch: LastBatch | None = None
    on_error: OnError = "raise"  # a set is packed once and can be mended; what is left out in silence is never looked at
    max_pixels: int = PIXEL_LIMIT  # 600 MB; what is larger is a bomb, or belongs into a set of its own
    max_skipped: int | float = 0.01
    lanes: int = 8  # a batch of 64 mixes eight places of the set
    window_bytes: int = 32 * 2**20  # what a 7200 rpm drive reads in a fifth of a second: a seek or two hardly count
    prefetch_factor: int = 2  # torch's own; more only holds more memory once the workers keep up
    multiprocessing_context: StartMethod | None = None
    persistent_workers: bool = True  # starting workers anew costs seconds an epoch
    timeout: float = 0.0
    ahead: int = 0
    rank: int | None = None
    world_size: int | None = None
    prefetch: bool = True  # without it each worker reads where its samples lie, and a rotating disk seeks
    keep_bytes: int | None = None
    http: HttpOptions | None = None
    objects: ObjectOptions | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    connections: int = 4

    def __new__(cls, **given: Any) -> Self:
        """Refuse a misspelled option with the nearest valid one."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                hint = _ELSEWHERE.get(name) or _nearest(name, known)
                raise OptionsError(f"LoaderOptions has no {name!r}{hint}; it has {', '.join(known)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("decode", _DECODE),
            ("dtype", _DTYPE),
            ("last_batch", (None, *_LAST_BATCH)),
            ("on_error", _ON_ERROR),
        ):
            _check_choice(name, getattr(self, name), allowed)
        _check_choice("multiprocessing_context", self.multiprocessing_context, (None, *_START))
        for name in ("keys", "persistent_workers", "prefetch"):
            _check_choice(name, getattr(self, name), (True, False))
        check_int("lanes", self.lanes, 1, MAX_LANES)
        check_int("window_bytes", self.window_bytes, 1, _MOST_BYTES)
        check_int("prefetch_factor", self.prefetch_factor, 1, 2**16)
        self._check_skipped()
        check_int("max_pixels", self.max_pixels, 1, _MOST_PIXELS)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or not 0 <= self.timeout <= 1e7:
            raise OptionsError(f"timeout={self.timeout!r}: seconds, 0 (for ever) to 10,000,000")
        check_int("ahead", self.ahead, 0, 1)  # one that fetches more doesn't tell how far it is at the end of an epoch
        for name in ("keep_bytes", "cache_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, _MOST_BYTES)
        check_int("connections", self.connections, 1, MAX_CONNECTIONS)
        self._check_remote()
        self._check_ranks()
        _check_text("split", self.split)
        self._check_fields()
        self._check_classes()

    def _check_skipped(self) -> None:
        most = self.max_skipped
        counted = isinstance(most, int) and not isinstance(most, bool) and 0 <= most <= _MOST_BYTES
        if not counted and not (isinstance(most, float) and 0 <= most <= 1):
            raise OptionsError(f"max_skipped={most!r}: a count of samples, 0 or more, or as a float a share of them, 0.0 to 1.0")

    def _check_remote(self) -> None:
        if self.cache_dir is not None and not _is_named(self.cache_dir):
            raise OptionsError(f"cache_dir={self.cache_dir!r}: a folder, or None for the user's cache folder")
        if self.cache_dir is not None and not _is_path(self.cache_dir):
            raise OptionsError(f"cache_dir={self.cache_dir!r}: holds signs that no path can hold")
        if self.cache_dir is not None:  # the same for all processes, whatever their current folder is by then
            object.__setattr__(self, "cache_dir", os.path.abspath(os.path.expanduser(self.cache_dir)))  # noqa: PTH100, PTH111
        for name, kind in (("http", "HttpOptions"), ("objects", "ObjectOptions")):  # their modules need urllib3, local sets don't
            if (got := getattr(self, name)) is not None and type(got).__name__ != kind:
                raise OptionsError(f"{name}={type(got).__name__}: a pipeline.{kind}(...)")

    def _check_ranks(self) -> None:
        if self.rank is None and self.world_size is None:
            return
        if self.rank is None or self.world_size is None:
            raise OptionsError(f"rank={self.rank!r}, world_size={self.world_size!r}: give both, or neither")
        check_int("world_size", self.world_size, 1)
        check_int("rank", self.rank, 0, self.world_size - 1)

    def _check_fields(self) -> None:
        if not isinstance(self.image, str) or not all(self.image.split(";")):
            raise OptionsError(f"image={self.image!r}: fields separated by semicolons, such as 'jpg;png'")
        _check_text("label", self.label)
        if self.label is not None and (self.label == "json:" or self.label.partition(":")[0] not in (self.label, "json")):
            raise OptionsError(f"label={self.label!r}: a field such as 'cls', 'json:name' for a number in the json, or None")
        if self.decode == "none" and self.dtype != "float32":
            raise OptionsError(f"dtype={self.dtype!r} with decode='none': bytes aren't decoded, so there is no dtype; leave it out")

    def _check_classes(self) -> None:
        if self.classes is None:
            return
        named = isinstance(self.classes, Iterable) and not isinstance(self.classes, str | bytes | Mapping | Set)
        if not named or not all(isinstance(name, str) for name in self.classes):
            raise OptionsError(f"classes={self.classes!r}: the class names in order, as train.classes")
        object.__setattr__(self, "classes", tuple(self.classes))

    @property
    def image_fields(self) -> tuple[str, ...]:
        """The fields that can hold the picture, in order of preference."""
        return tuple(self.image.split(";"))

    @property
    def label_field(self) -> str | None:
        """The tar field that holds the label."""
        return None if self.label is None else self.label.partition(":")[0]

    @property
    def label_name(self) -> str | None:
        """The name within the json that holds the label, None where the field is the label."""
        return self.label.partition(":")[2] or None if self.label else None


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_choice(name: str, got: object, allowed: Sequence[object]) -> None:
    if not any(got is choice or (isinstance(got, str) and got == choice) for choice in allowed):
        near = _nearest(got, [a for a in allowed if isinstance(a, str)]) if isinstance(got, str) else ""
        raise OptionsError(f"{name}={got!r}: one of {', '.join(map(repr, allowed))}{near}")


def _check_text(name: str, got: object) -> None:
    if got is not None and (not isinstance(got, str) or not got):
        raise OptionsError(f"{name}={got!r}: a text, or None")


def _is_named(given: object) -> bool:
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    return isinstance(path, str) and bool(path)


def _is_path(given: str | os.PathLike[str]) -> bool:
    try:
        return b"\0" not in os.fsencode(given)
    except UnicodeError:
        return False


def check_int(name: str, got: object, least: int, most: int | None = None) -> None:
    """Raise OptionsError unless `got` is a whole number from `least` to `most`."""
    if isinstance(got, bool) or not isinstance(got, int) or got < least or (most is not None and got > most):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        other = hasattr(got, "__index__") and not isinstance(got, int)  # of numpy or torch
        raise OptionsError(f"{name}={got!r}: a whole number, {wanted}" + (", as Python's int: int(x)" if other else ""))


def field_names(fields: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return fields given as "jpg;cls" or as a list, in lower case."""
    if fields is None:
        return None
    names = fields.split(";") if isinstance(fields, str) else fields
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise OptionsError(f'fields={fields!r}: fields such as "jpg;cls", or None for all')
    return tuple(name.lower() for name in names)


def check_arguments(
    options: object, *, batch_size: int, num_workers: int | None, shuffle: bool, seed: int, transform: object
) -> None:
    """Raise OptionsError for arguments of make_loader that can't be used."""
    if not isinstance(options, LoaderOptions):
        raise OptionsError(f"options is of type {type(options).__name__}: a pipeline.LoaderOptions(...)")  # it may hold secrets
    check_int("batch_size", batch_size, 1)
    check_int("seed", seed, 0, _SEED_LIMIT)
    if num_workers is not None:
        check_int("num_workers", num_workers, 0)
    _check_choice("shuffle", shuffle, (True, False))
    if transform is not None and options.decode == "none":
        raise OptionsError(
            "transform with decode='none': the bytes aren't decoded, so nothing can be transformed; leave one of them out"
        )
