"""Decides which epoch an iteration begins, where in it, and what a saved state says; it reads nothing.

    iter                begins the next epoch, after an early break too; the first one after `load` goes on inside its epoch
    set_epoch(e)        picks the epoch of the next iter; for the loaded epoch the position stays
    a batch is handed over    it is seen: the state goes on behind it; behind the last one it is (e, end)
    load of (e, end)    the next iter begins e + 1, or is empty after set_epoch(e)

An iteration that was never asked for a batch has used nothing up: frameworks call `iter` only to see whether that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.arrival import ArrivalSettings
from pipeline.epoch import ORDER_VERSION, Layout, OrderSettings
from pipeline.errors import OptionsError
from pipeline.options import check_int

MAX_EPOCH = 2**64 - 1


class Place(NamedTuple):
    """A place in a training: an epoch, and the global position in it that comes next; the number of samples is its end."""

    epoch: int
    position: int


class Epochs:
    """Which epoch comes next, and how far the one being read is; `seen` is what a state says."""

    def __init__(self) -> None:
        self.seen = Place(0, 0)
        self._next = Place(0, 0)
        self._chosen = False  # set_epoch picked `_next`: then it is kept even where nothing is left of it
        self._loaded: Place | None = None  # until an iteration is asked for a batch
        self._begun: Place | None = None  # an iteration that wasn't asked for a batch yet

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the one that the next iteration begins."""
        check_int("epoch", epoch, 0, MAX_EPOCH)
        loaded = self._loaded
        self._next = self.seen = loaded if loaded is not None and loaded.epoch == epoch else Place(epoch, 0)
        self._chosen, self._begun = True, None

    def load(self, place: Place) -> None:
        """Go on at `place` with the next iteration."""
        self._next = self._loaded = self.seen = place
        self._chosen, self._begun = False, None

    def begin(self, is_end: Callable[[int], bool]) -> Place:
        """Return where the next iteration begins; `is_end` tells whether no step is left from a position on."""
        place = self._next
        if not self._chosen and is_end(place.position):
            place = Place(place.epoch + 1, 0)
        self.seen = self._begun = place
        return place

    def ask(self) -> None:
        """Note that the iteration begun last is asked for its first batch: now it is used up."""
        if self._next == self._loaded:
            self._next = Place(self._next.epoch, 0)
        self._loaded = None
        if self._begun is not None:
            self._next, self._chosen = Place(self._begun.epoch + 1, 0), False
        self._begun = None

    def see(self, place: Place) -> None:
        """Note how far the trainer is."""
        self.seen = place


@dataclass(frozen=True, slots=True)
class Identity:
    """What a position means something in: the set, by its digest and number of samples, and the settings of its order."""

    digest: str
    samples: int | None
    order: OrderSettings

    def facts(self) -> dict[str, Any]:
        """Return all that must be equal where a state is loaded, and on all ranks."""
        order = self.order
        return {
            "order_version": ORDER_VERSION,
            "digest": self.digest,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "lanes": order.lanes,
            "window": order.window,
        }

    def save(self, place: Place) -> dict[str, Any]:
        """Return a state: plain numbers and texts, so that any format keeps it."""
        return {**self.facts(), "epoch": place.epoch, "position": place.position}

    def restore(self, state: Mapping[str, Any]) -> Place:
        """Return a state's place; raises OptionsError, naming both sides, where it is of another set or order."""
        if not isinstance(state, Mapping):
            raise OptionsError(f"state is of type {type(state).__name__}: give what state_dict() returned")
        facts = self.facts()
        if missing := [name for name in (*facts, "epoch", "position") if name not in state]:
            raise OptionsError(f"state lacks {', '.join(missing)}: give what a loader's state_dict() returned")
        other = [_differs(name, state[name], here) for name, here in facts.items() if state[name] != here]
        if other:
            raise OptionsError(f"this state is of another set or order: {'; '.join(other)}; {_CURE}")
        check_int("epoch", state["epoch"], 0, MAX_EPOCH)
        check_int("position", state["position"], 0, self.samples)
        return Place(state["epoch"], state["position"])


_CURE = "make the loader as the one that saved the state, or don't load it and begin an epoch with set_epoch"
_MEANS = {
    "order_version": "the version of the order",
    "digest": "the digest of the set",
    "window": "window (samples in LoaderOptions(window_bytes))",
    "lanes": "lanes (LoaderOptions)",
}


def _differs(name: str, there: object, here: object) -> str:
    there, here = (f"{value[:16]}..." if name == "digest" and isinstance(value, str) else repr(value) for value in (there, here))
    return f"{_MEANS.get(name, name)} is {there} in the state and {here} here"


def identify(digest: str, order: ArrivalSettings, layout: Layout | None) -> Identity:
    """Return what states and ranks are compared by; of a set that arrives (no layout) it depends on nothing counted later."""
    if layout is not None:
        return Identity(digest, layout.samples, layout.settings)
    settings = OrderSettings(seed=order.seed, lanes=order.lanes, window=order.window_bytes, shuffle=order.shuffle)
    return Identity(digest, None, settings)
