"""What a sample costs that can't become part of a batch: the epoch, or a place that another one of its batch takes.

This is the one place where that is decided, for what can't be read, decoded or transformed. Errors of the system, of a disk or of
memory, are nobody's samples: they end the epoch whatever may be skipped. A replacement depends on the batch alone, so it is the
same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from pipeline.errors import SkippedError
from pipeline.items import Sample, Skip, SkippedStats

_SHOWN, _SHOWN_LENGTH = 20, 500  # skipped samples that are kept by name, and of how long a reason
_OPEN_SAMPLES = 1000  # where nobody counted the samples, a share is at least of so many
_REPLACED = 2**32  # above the occurrences that a padded epoch counts
_NO_MEMORY = -4  # the code of a cv2.error for which there is no room: cv2.Error.StsNoMem


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of an epoch may be skipped: a count of samples, or as a float a share of them; None where nothing may."""

    most: float | None = None

    def allows(self, samples: int) -> int:
        """Return how many of an epoch's samples may be skipped."""
        if self.most is None:
            return 0
        return int(Fraction(str(self.most)) * samples) if isinstance(self.most, float) else self.most

    def __str__(self) -> str:
        return f"LoaderOptions(max_skipped={self.most})"


class Faults:
    """What went wrong with the samples of one batch, and the raw samples that can stand in for others."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self._raw: dict[int, Sample] = {}
        self._left_out: set[int] = set()
        self.skips: list[Skip] = []

    def keep(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield raw samples, and remember them: each may stand in for others."""
        for sample in samples:
            self._raw[sample["__place__"]] = sample.copy()
            yield sample

    def take(self, error: Exception, place: int, cause: str) -> None:
        """Leave out the sample at a place of the batch; raises its error where nothing may be skipped, or it is the system's."""
        if not self._skip or is_of_the_system(error):
            raise error
        self._left_out.add(place)
        self.skips.append(Skip(cause, str(error)[:_SHOWN_LENGTH]))

    def refill(self, samples: Iterable[Sample], make: Callable[[Iterator[Sample]], Iterator[Sample]]) -> Iterator[Sample]:
        """Yield the samples, then for each that was left out the nearest good one of the batch, made anew under another draw.

        `make`: decodes and transforms raw samples. Raises SkippedError where no sample of the batch is good.
        """
        yield from samples
        for place in sorted(self._left_out):
            yield self._stand_in(place, make)

    def _stand_in(self, place: int, make: Callable[[Iterator[Sample]], Iterator[Sample]]) -> Sample:
        good = self._raw.keys() - self._left_out
        for other in sorted(good, key=lambda at: (abs(at - place), at)):
            raw = self._raw[other]
            anew = raw | {"__place__": place, "__occurrence__": raw["__occurrence__"] + _REPLACED + place}
            known = len(self.skips)
            for sample in make(iter([anew])):
                return sample
            del self.skips[known:]  # good under the draw that it has in its own place
        raise SkippedError(
            f"none of the {len(self._left_out)} samples of a batch can be used, so none can stand in for the others; the first: "
            f"{self.skips[0].reason}"
        )


def is_of_the_system(error: BaseException) -> bool:
    """Tell whether an error, or what it was raised from, is of a disk, of memory or of another part of the machine.

    An OSError without a number is none of the system's: Pillow says so that a picture is cut.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return True
        if isinstance(seen, MemoryError) or (type(seen).__name__ == "error" and getattr(seen, "code", 0) == _NO_MEMORY):
            return True
        seen = seen.__cause__
    return False


class Account:
    """Adds up what was skipped in one iteration; lives in the trainer's process."""

    def __init__(self, budget: Budget, epoch: int, samples: int | None) -> None:
        """Take the samples that the iteration has for this rank, None where nobody counted them."""
        self._budget, self._epoch, self._samples = budget, epoch, samples
        self._causes: dict[str, int] = {}
        self._first: list[str] = []
        self._count = 0

    def add(self, skips: Iterable[Skip], samples: int) -> None:
        """Count a batch's, `samples` having come until then; raises SkippedError above the budget."""
        for skip in skips:
            self._count += 1
            self._causes[skip.cause] = self._causes.get(skip.cause, 0) + 1
            if len(self._first) < _SHOWN:
                self._first.append(skip.reason)
        of = max(samples, _OPEN_SAMPLES) if self._samples is None else self._samples
        if self._count > self._budget.allows(of):
            raise SkippedError(
                f"epoch {self._epoch}: {self.stats()} of the {samples} samples so far, and {self._budget} allows "
                f"{self._budget.allows(of)}; the first: {self._first[0]}"
            )

    def stats(self) -> SkippedStats:
        """Return what was skipped so far."""
        return SkippedStats(self._count, dict(self._causes), tuple(self._first))
