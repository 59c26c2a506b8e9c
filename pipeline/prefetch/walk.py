"""Decides in which order a rank's windows are read: that in which its batches need them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.epoch import EpochOrder, Ints, Window
from pipeline.world import World


class Need(NamedTuple):
    """A window, the global positions of the first and the last sample that an epoch takes from it, and what its last piece leaves.

    `rest`, int64 (reads, 3), are the ranges that the lane's next windows read of the piece that this one ends in.
    """

    window: Window
    first: int
    last: int
    rest: Ints


def lanes_of(world: World, lanes: int, position: int) -> list[int]:
    """Return the lanes that a rank's batches touch from a global position on: its own, where the ranks divide the lanes; else all.

    A rank takes the positions g with (g - position) mod world_size = rank, and g is in lane g mod lanes.
    """
    if lanes % world.world_size:
        return list(range(lanes))
    return [lane for lane in range(lanes) if (lane - position) % world.world_size == world.rank]


def needs(order: EpochOrder, lanes: list[int], position: int) -> Iterator[Need]:
    """Yield the windows of lanes in the order in which the epoch needs them from a global position on."""
    several = [_of_lane(order, lane, position) for lane in lanes]
    yield from heapq.merge(*several, key=lambda need: need.first)


def ranges(reads: Ints) -> list[tuple[int, int, int]]:
    """Return what a window reads, int64 (reads, 3), as (shard, first sample, end) in storage order, ranges that touch as one.

    The samples of a window come in no order anyway; a block that is entered in its middle and wraps is read through.
    """
    found: list[tuple[int, int, int]] = []
    for shard, first, stop in sorted(reads.tolist()):
        if found and found[-1][0] == shard and found[-1][2] == first:
            found[-1] = (shard, found[-1][1], stop)
        else:
            found.append((shard, first, stop))
    return found


def _of_lane(order: EpochOrder, lane: int, position: int) -> Iterator[Need]:
    lanes = order.layout.settings.lanes
    place = max(0, -(-(position - lane) // lanes))
    size = int(order.layout.lane_starts[lane + 1] - order.layout.lane_starts[lane])
    if place >= size:
        return
    for window in order.windows(lane, place):
        yield Need(window, max(window.start, place) * lanes + lane, (window.stop - 1) * lanes + lane, order.rest(window))
