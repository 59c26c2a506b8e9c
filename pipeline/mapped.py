"""Gives the raw samples of a set by number or key, in storage order: `ShardDataset`, for programs that draw samples themselves."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from pipeline.errors import OptionsError, ShardError
from pipeline.items import Sample
from pipeline.options import field_names
from pipeline.raw import RawReader
from pipeline.survey import check_counted, survey
from pipeline.urls import refuse_remote, resolve


class ShardDataset(Dataset[Any]):
    """Hold a set's samples as a sequence: `dataset[i]` is {"__key__", "__url__", "jpg": bytes, ...}, or `transform` of it.

    `shards`: a manifest, or what else `make_loader` takes; `fields`: those that are read, such as "jpg;cls" (None: all). Numbers
    count from 0 in storage order, negative ones from the end; a slice gives a list; a text is a key. Reading in another order
    than the stored one costs a hard disk a seek a sample: `make_loader` doesn't.

    Raises SourceError for shards that aren't there, UncountedError where nobody counted their samples.
    """

    def __init__(
        self,
        shards: Any,
        *,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        fields: str | Sequence[str] | None = None,
        split: str | None = None,
    ) -> None:
        if transform is not None and not callable(transform):
            raise OptionsError(f"transform={transform!r}: a function of a sample, or None")
        found = resolve(shards, split=split)
        refuse_remote(found, "ShardDataset")
        known = survey(found)
        check_counted(known, "pipeline.ShardDataset")
        self.classes = found.classes
        self._files, self._transform = known.files, transform
        self._ends = np.cumsum([file.samples for file in known.files], dtype=np.int64)
        self._reader = RawReader(known.files, field_names(fields))
        self._hashes: tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, at: SupportsIndex | str) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: SupportsIndex | str | slice) -> Any:
        """Return a sample, a list of a slice's samples, or the sample of a key; raises IndexError or KeyError for none."""
        if isinstance(at, slice):
            return self.__getitems__(range(len(self))[at])
        number = self.index(at) if isinstance(at, str) else self._number(at)
        return self._transformed(self._reader.read(*self._place(number)))

    def __getitems__(self, numbers: Iterable[SupportsIndex]) -> list[Any]:
        """Return several samples, read in the order in which they are stored; a torch DataLoader asks for its batches so."""
        wanted = [self._number(number) for number in numbers]
        read = {number: self._reader.read(*self._place(number)) for number in sorted(set(wanted))}
        return [self._transformed(dict(read[number])) for number in wanted]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and len(self._numbers_of(key)) > 0

    def index(self, key: str) -> int:
        """Return the number of a key's sample; the first call reads all indexes.

        Raises KeyError where no sample has it, ShardError where several have.
        """
        numbers = self._numbers_of(key)
        if not numbers:
            raise KeyError(f"no sample of {len(self)} has the key {key!r}")
        if len(numbers) > 1:
            places = ", ".join(f"{number} in {self._files[self._place(number)[0]].path}" for number in numbers[:3])
            raise ShardError(f"{len(numbers)} samples have the key {key!r}: {places}; ask for one by its number")
        return numbers[0]

    def close(self) -> None:
        """Close the shards that this process holds open; reading opens them anew."""
        self._reader.close()

    def _number(self, at: SupportsIndex) -> int:
        number = operator.index(at)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return number % len(self)

    def _place(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - int(self._ends[shard]) + self._files[shard].samples

    def _transformed(self, sample: Sample) -> Any:
        return sample if self._transform is None else self._transform(sample)

    def _numbers_of(self, key: str) -> list[int]:
        if self._hashes is None:
            keys = (_hash(key) for shard in range(len(self._files)) for key in self._reader.index(shard).keys)
            hashes = np.fromiter(keys, np.uint64, len(self))  # 16 bytes a sample, where a dict of keys takes 200
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order], order
        hashes, order = self._hashes
        begin, end = (int(np.searchsorted(hashes, np.uint64(_hash(key)), side)) for side in ("left", "right"))
        alike = [(number, *self._place(number)) for number in order[begin:end].tolist()]
        return [number for number, shard, at in alike if self._reader.index(shard).keys[at] == key]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
