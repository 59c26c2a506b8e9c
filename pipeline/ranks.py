"""Compares what the ranks are about to read, through torch.distributed's default store, and names those that differ.

Each rank writes what it reads under the name of its loader; rank 0 collects and writes a verdict that the others wait for. A loader
is named by the place in the program that made it: a loader that only some ranks make doesn't shift the names of the others. Nor
does a comparison to which only some ranks came: that is made again under its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pipeline.errors import OptionsError
from pipeline.options import MAX_LANES

log = logging.getLogger("pipeline")

WAIT_SECONDS = 30.0
AGAIN_SECONDS = 1.0  # ranks that train together come to an epoch within less, and one that evaluates alone loses no more
_LONGEST_NAP = 0.2
_CURE = (
    "give all ranks the same set, the same arguments and the same epochs (each iter uses one up, a peek too; set_epoch picks one)"
)
_OTHERS = (f"{Path(__file__).parent}{os.sep}", f"{Path(os.__file__).parent}{os.sep}", "<frozen")
_made: Counter[str] = Counter()


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102


def default_store() -> Store | None:
    """Return the store of the default process group, None where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        store: Store = distributed.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # not public: another release of torch may not have it
        return None
    return store


def name_of_caller() -> str:
    """Return a name for a loader that is being made: the lines of the program that led here, and how many were made there before.

    The same program gives the same names on all ranks, wherever it and its libraries are installed.
    """
    lines = list[str]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OTHERS) and "site-packages" not in code.co_filename:
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    site = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    _made[site] += 1
    return f"{site}-{_made[site]}"


def lanes_hint(lanes: int, world_size: int) -> str:
    """Return what to tell where ranks can't each have lanes of their own: which number would let them; "" where they can."""
    if lanes % world_size == 0:
        return ""
    better = -(-lanes // world_size) * world_size
    cure = f"LoaderOptions(lanes={better})" if better <= MAX_LANES else f"no number up to {MAX_LANES}"
    return (
        f"{lanes} lanes don't divide over {world_size} ranks: batches are the same, but each rank reads of the whole set; "
        f"{cure} would let it read its part alone"
    )


def steps_hint(first: int, last: int, rank: int) -> str:
    """Return what to tell where rank 0 has more steps than the last `rank`, and what would make them equal; "" where they are."""
    if first == last:
        return ""
    return (
        f"rank 0 has {first} steps and rank {rank} has {last}: a trainer whose ranks wait for each other in each step hangs at the "
        f"epoch's end; LoaderOptions(last_batch='pad') gives each rank {first}, and some samples twice"
    )


def compare(
    store: Store,
    name: str,
    claim: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    attempt: int = 1,
    wait_seconds: float = WAIT_SECONDS,
) -> bool:
    """Raise OptionsError on all ranks where their claims differ, with the rank and what differs; return whether all ranks came.

    A rank that doesn't come for `wait_seconds` is warned of, and not waited for any longer: evaluation may be rank 0's alone. Where
    not all came each makes another `attempt` under the same name at its next occasion, and then waits but a moment.
    """
    key, text = f"pipeline/{name}", json.dumps(claim)
    seconds = wait_seconds if attempt == 1 else min(wait_seconds, AGAIN_SECONDS)
    if rank == 0:
        verdict = _judge(store, key, text, world_size, seconds)
    else:
        store.set(f"{key}/{rank}", f"{attempt} {text}")
        heard = _hear(store, key, text, rank, world_size, attempt, seconds)
        store.set(f"{key}/{rank}", "")  # a claim that is there is of a rank that waits
        if heard is None:
            log.warning("rank %d heard nothing of rank 0 for %.0f s, and goes on to read alone", rank, seconds)
            return False
        verdict = heard
    if verdict["says"]:
        raise OptionsError(f"{verdict['says']}; {_CURE}")
    return not verdict["absent"]


def _judge(store: Store, key: str, claim: str, world_size: int, seconds: float) -> dict[str, Any]:
    """Collect the claims as rank 0, and tell those that made one."""
    found = _collect(store, key, range(1, world_size), seconds)
    claims = {0: json.loads(claim)} | {other: json.loads(text) for other, (_, text) in found.items()}
    absent = [other for other in range(world_size) if other not in claims]
    verdict = {"reference": claims[_reference(claims)], "says": _difference(claims, world_size), "absent": absent}
    for at in (key, *(f"{key}/{other}/{attempt}" for other, (attempt, _) in found.items())):
        store.set(f"{at}/verdict", json.dumps(verdict))
    if absent:
        log.warning("ranks %s didn't begin to read within %.0f s: rank 0 goes on", _list(absent), seconds)
    return verdict


def _collect(store: Store, key: str, ranks: Sequence[int], seconds: float) -> dict[int, tuple[str, str]]:
    """Return (attempt, claim) of the ranks that wait, by rank; take them away, so that none counts twice."""
    found, deadline = dict[int, tuple[str, str]](), time.monotonic() + seconds
    while True:
        missing = _wait(store, [f"{key}/{rank}" for rank in ranks if rank not in found], deadline)
        for rank in ranks:
            if rank not in found and f"{key}/{rank}" not in missing and (text := store.get(f"{key}/{rank}").decode()):
                attempt, _, claim = text.partition(" ")
                found[rank] = attempt, claim
                store.set(f"{key}/{rank}", "")
        if len(found) == len(ranks) or time.monotonic() >= deadline:
            return found
        time.sleep(_LONGEST_NAP / 10)  # one that is there went away, and may come again


def _hear(store: Store, key: str, claim: str, rank: int, world_size: int, attempt: int, seconds: float) -> dict[str, Any] | None:
    """Return the verdict over this rank's claim, else the last one over others' claims; None where there is none."""
    mine, last = f"{key}/{rank}/{attempt}/verdict", f"{key}/verdict"
    if store.check([last]):  # rank 0 was here before, and may come again
        seconds = min(seconds, AGAIN_SECONDS)
    missing = _wait(store, [mine], time.monotonic() + seconds + AGAIN_SECONDS)  # rank 0 waits as long, and speaks then
    if missing and not store.check([last]):
        return None
    verdict: dict[str, Any] = json.loads(store.get(last if missing else mine))
    if rank in verdict["absent"]:  # one that comes after the verdict compares itself
        verdict["says"] = verdict["says"] or _difference({-1: verdict["reference"], rank: json.loads(claim)}, world_size)
    return verdict


def _wait(store: Store, keys: list[str], deadline: float) -> list[str]:
    """Return the keys that aren't there at the deadline; in short naps, so that Ctrl-C ends a wait."""
    nap = 0.001
    while keys and not store.check(keys):
        if time.monotonic() >= deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(nap)
        nap = min(_LONGEST_NAP, 2 * nap)
    return []


def _reference(claims: Mapping[int, Mapping[str, Any]]) -> int:
    """Return the first rank of the majority; of two equal parties, that of the first rank."""
    texts = {rank: json.dumps(claim, sort_keys=True) for rank, claim in sorted(claims.items())}
    count = Counter(texts.values())
    return max(texts, key=lambda rank: (count[texts[rank]], -rank))


def _difference(claims: Mapping[int, Mapping[str, Any]], world_size: int) -> str:
    """Say which ranks differ from the majority, and in what; "" where none does."""
    reference = claims[_reference(claims)]
    odd = [rank for rank, claim in claims.items() if claim != reference]
    if not odd:
        return ""
    first = claims[odd[0]]
    facts = [f"{name} is {first.get(name)!r}, elsewhere {value!r}" for name, value in reference.items() if first.get(name) != value]
    return f"rank {_list(odd)} of {world_size} would read otherwise than the others: {', '.join(facts)}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
