"""A trainer that outlives its helpers: reads epochs from a server, each again where it was broken off, until its stdin ends.

survivor.py URL CACHE ROOM SEED RANK WORLD: prints a JSON object a line, of an epoch that was read whole or of an error on the way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from afar import options, read

import pipeline


def digest(batches: list[Any]) -> str:
    """Return a hash of the batches of an epoch, as `afar.read` yields them."""
    return hashlib.sha256(repr(batches).encode()).hexdigest()


def say(**what: Any) -> None:
    """Print a line at once, whole."""
    os.write(sys.stdout.fileno(), json.dumps(what).encode() + b"\n")


def main() -> None:
    """Read epochs until nobody wants them any more."""
    url, cache, room, *numbers = sys.argv[1:]
    seed, rank, world = map(int, numbers)
    given = options(Path(cache), cache_bytes=int(room), rank=rank, world_size=world)
    with pipeline.make_loader(url, batch_size=16, num_workers=2, seed=seed, options=given) as loader:
        for epoch in itertools.count():
            while True:
                loader.set_epoch(epoch)
                try:
                    say(epoch=epoch, digest=digest(list(read(loader))))
                    break
                except pipeline.PipelineError as error:
                    say(epoch=epoch, error=f"{type(error).__name__}: {error}"[:300])
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    main()
