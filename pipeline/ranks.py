"""Compares what the ranks are about to read, through torch.distributed's default store, and names those that differ.

Each rank writes what it reads under the name of its loader; rank 0 collects and writes a verdict that the others wait for. A loader
is named by the place in the program that made it: a loader that only some ranks make doesn't shift the names of the others.
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
_LONGEST_NAP = 0.2
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


def compare(
    store: Store, name: str, claim: Mapping[str, Any], *, rank: int, world_size: int, wait_seconds: float = WAIT_SECONDS
) -> None:
    """Raise OptionsError on all ranks where their claims differ, with the rank and what differs.

    A rank that doesn't come for `wait_seconds` is warned of, and not waited for any longer: evaluation may be rank 0's alone.
    """
    key = f"pipeline/{name}"
    store.set(f"{key}/{rank}", json.dumps(claim))
    deadline = time.monotonic() + wait_seconds
    if rank == 0:
        missing = _wait(store, [f"{key}/{other}" for other in range(1, world_size)], deadline)
        absent = {int(k.rpartition("/")[2]) for k in missing}
        claims = {r: json.loads(store.get(f"{key}/{r}")) for r in range(world_size) if r not in absent}
        verdict = {"reference": claims[_reference(claims)], "says": _difference(claims, world_size)}
        store.set(f"{key}/verdict", json.dumps(verdict))
        if absent:
            log.warning("ranks %s didn't begin to read within %.0f s: rank 0 goes on", _list(sorted(absent)), wait_seconds)
    elif _wait(store, [f"{key}/verdict"], deadline):
        log.warning("rank %d heard nothing of rank 0 for %.0f s, and goes on to read alone", rank, wait_seconds)
        return
    else:
        verdict = json.loads(store.get(f"{key}/verdict"))
    # One that comes after the verdict compares itself.
    says = verdict["says"] or _difference({-1: verdict["reference"], rank: json.loads(json.dumps(claim))}, world_size)
    if says:
        raise OptionsError(f"{says}; give all ranks the same set and the same arguments")


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
