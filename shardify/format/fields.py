"""Says in what the samples of a split differ that should be alike, their fields, and what a trainer must say to read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardify.format.tar import SampleRecord

PICTURES = frozenset(("jpg", "jpeg", "png", "webp"))
_SETS = 1000  # more sets of fields than this come from dots in names, a field for each sample


@dataclass(slots=True)
class FieldCensus:
    """Counts the sets of fields that samples have; pictures of whatever type count as one field."""

    all: set[str] = field(default_factory=set)
    _counts: dict[tuple[str, ...], int] = field(default_factory=dict)
    _first: dict[tuple[str, ...], str] = field(default_factory=dict)
    _others: int = 0

    def add(self, record: SampleRecord, place: str) -> None:
        """Count a sample of the tar `place`."""
        alike = tuple(sorted("picture" if name.lower() in PICTURES else name for name in record.fields))
        if alike not in self._counts:
            if len(self._counts) >= _SETS:
                self._others += 1
                return
            self.all.update(record.fields)
            self._counts[alike] = 0
            self._first[alike] = f"{place}: sample {record.key!r} has {', '.join(record.fields)}"
        elif not self.all.issuperset(record.fields):
            self.all.update(record.fields)
        self._counts[alike] += 1

    def notes(self, split: str) -> Iterator[str]:
        """Yield what a trainer has to know, or to say, to read a split of such samples."""
        pictures = sorted(self.all & PICTURES)
        if self.all and not pictures:
            yield f"{split}: no field jpg, jpeg, png or webp; make_loader needs LoaderOptions(image=...)"
        if len(pictures) > 1:
            yield f"{split}: pictures are of several types: {', '.join(pictures)}"
        if self.all and "cls" not in self.all:
            yield f"{split}: no field cls; make_loader needs LoaderOptions(label='json:<name>') or label=None"

    def differences(self) -> Iterator[str]:
        """Yield a line for each set of fields but the commonest: how many samples have it, and the first of them."""
        ranked = sorted(self._counts, key=lambda alike: -self._counts[alike])
        for alike in ranked[1:]:
            count, cut = self._counts[alike], any("." in name for name in alike)
            hint = " (a dot in a file's name ends its key, and the rest is its field)" if cut else ""
            yield f"{self._first[alike]}{hint}, {_like_it(count)}; most have {', '.join(ranked[0])}"
        if self._others:
            yield f"and {self._others:,} samples with still other fields; does a dot in each file's name end its key?"


def _like_it(count: int) -> str:
    return "alone" if count == 1 else f"as {count:,} samples do"
