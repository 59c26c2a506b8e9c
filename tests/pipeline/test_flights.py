"""Windows on their way from afar: several at once, each lane's in its order, and runs that don't wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty import Fault, Faulty, Request
from prefetching import COUNT, packed
from residence import PackedSet
from walking import read_epoch, reader_of

from pipeline.prefetch.fetching import NoRoom
from pipeline.prefetch.flights import Flight, Flights, Wanted
from pipeline.progress import Block
from pipeline.stores.cache import Cache

__all__ = ["packed"]


@pytest.fixture
def block() -> Iterator[Block]:
    """What a trainer, its prefetcher and its workers share."""
    made = Block.make()
    yield made
    made.close()


def fleet_of(folder: Path, block: Block) -> Flights:
    """Return flights, two at once, whose fetcher does nothing by itself."""
    nothing: Any = SimpleNamespace(cache=Cache(folder, 10**6), alive=lambda: None, stop=lambda: None, close=lambda: None)
    nothing.interrupt = nothing.begin = lambda: None
    return Flights(nothing, block, 2)


def landed(fleet: Flights, until: Any) -> None:
    """Land what comes until something holds."""
    end = time.monotonic() + 10
    while not until():
        assert time.monotonic() < end, "it hangs"
        fleet.land()
        time.sleep(0.002)


def test_a_run_is_not_held_up_by_one_before_it(tmp_path: Path, block: Block) -> None:
    """Windows of a run that was left wait for a dead server: the next one's are fetched and said meanwhile, in the same lane too."""
    answered = threading.Event()

    def silent(_flight: Flight, _wanted: Wanted) -> None:
        answered.wait()

    fleet = fleet_of(tmp_path, block)
    fleet.begin(1)
    for stop in (1, 2):
        fleet.send(Flight(1, 0, stop, stop, stop, 10), silent)
    assert fleet.full
    fleet.begin(2)
    assert not fleet.full
    fleet.send(Flight(2, 0, 1, 1, 1, 10), lambda _flight, _wanted: None)
    landed(fleet, lambda: block.resident(0, 2) == 1)
    assert fleet.pending and fleet.held_bytes == 30
    answered.set()
    landed(fleet, lambda: not fleet.pending)
    assert fleet.held_bytes == 10
    fleet.close()


def test_a_lane_waits_for_what_was_turned_back(tmp_path: Path, block: Block) -> None:
    """A lane's second window is there first: it isn't said before the first one is, whatever that one's tries come to."""
    tries = [NoRoom("full"), NoRoom("full"), None]

    def fetch(flight: Flight, _wanted: Wanted) -> None:
        if flight.stop == 1 and (error := tries.pop(0)):
            raise error

    fleet = fleet_of(tmp_path, block)
    fleet.begin(1)
    for stop in (1, 2):
        fleet.send(Flight(1, 0, stop, stop, stop, 10), fetch)
    for _ in range(2):
        landed(fleet, lambda: bool(fleet.turned_back))
        assert block.resident(0, 1) == 0 and fleet.full
        fleet.send_again(fleet.turned_back[0])
    landed(fleet, lambda: not fleet.pending)
    assert block.resident(0, 1) == 2 and not tries
    fleet.close()


def test_a_run_that_ends_lets_go_of_what_was_turned_back(tmp_path: Path, block: Block) -> None:
    """It is neither on its way nor held any more, and the next run has both places."""

    def fetch(_flight: Flight, _wanted: Wanted) -> None:
        raise NoRoom("full")

    fleet = fleet_of(tmp_path, block)
    fleet.begin(1)
    fleet.send(Flight(1, 0, 1, 1, 1, 10), fetch)
    landed(fleet, lambda: bool(fleet.turned_back))
    fleet.begin(2)
    assert fleet.none and not fleet.pending and fleet.held_bytes == 0
    fleet.close()


def test_a_new_run_ends_what_the_one_before_it_waits_for(packed: PackedSet, tmp_path: Path, block: Block) -> None:
    """A server falls silent in the middle of its replies: whoever begins anew doesn't wait for them, though it wants the same bytes."""
    stalled = threading.Event()

    def script(request: Request) -> Fault | None:
        if request.target.endswith(".tar") and not stalled.is_set():
            return Fault(cut=70_000, stall=120.0)
        return None

    with Faulty(packed.folder, script) as server:
        reader = reader_of(packed.folder, server, tmp_path / "cache", block, idle_seconds=60.0)
        try:
            reader.begin(1, 0, 0)
            until = time.monotonic() + 10
            while sum(request.target.endswith(".tar") for request in server.log) < 4 and time.monotonic() < until:
                reader.step()
                time.sleep(0.002)
            time.sleep(0.2)
            stalled.set()
            began = time.monotonic()
            read_epoch(reader, block, 2)
            assert time.monotonic() - began < 20
            assert block.resident(0, 2) + block.resident(1, 2) >= COUNT
        finally:
            reader.close()
