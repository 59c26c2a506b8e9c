"""Asks object stores by a short-lived process: this one, a trainer's, may fork, which obstore's runtime doesn't survive.

here   {"look": url}                                  one request a line, the first of all says how
there  {"remote": ...} | {"bytes": n} and n bytes | {"names": {...}} | {"error": text}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from pipeline.errors import RemoteError, SourceError, heard
from pipeline.stores.http.reading import Expect
from pipeline.stores.http.replies import HEAD_BYTES, Remote
from pipeline.stores.objects.address import ObjectAddress
from pipeline.stores.objects.options import ObjectOptions


class _Line(dict[str, Any]):
    """A line for the process; not shown, as options hold secrets, and a traceback may show the locals of what failed."""

    def __repr__(self) -> str:
        return f"<a request of {len(self)} entries>"


class Finder:
    """Looks at objects, lists and fetches small ones; for one thread. The process starts with the first request."""

    def __init__(self, kind: str, options: ObjectOptions | None = None) -> None:
        """Remember how to ask; `kind`: s3, gs or az."""
        self._kind, self._options = kind, options or ObjectOptions()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process; a second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def look(self, url: str) -> Remote:
        """Return what lies at a URL; raises RemoteError."""
        return Remote(**self._ask(url, {"look": url})["remote"])

    def names(self, url: str) -> dict[str, Remote]:
        """Return what lies right in a folder, by name; raises RemoteError."""
        return {name: Remote(**found) for name, found in self._ask(url, {"names": url})["names"].items()}

    def fetch(self, url: str, limit: int, *, expect: Expect | None = None) -> bytes:
        """Return all of a small object; raises RemoteError, also where it has more than `limit` bytes."""
        size = self._ask(url, {"fetch": url, "limit": limit})["bytes"]
        process = self._process
        assert process is not None
        assert process.stdout is not None
        data = process.stdout.read(size)
        if len(data) != size:
            self._ended(url)
        if expect is not None and not expect(data[:HEAD_BYTES]):
            raise RemoteError(f"{ObjectAddress(url)}: isn't what it was taken for; is the URL right?")
        return data

    def _ask(self, url: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = _spawn()
            self._say(url, _Line(kind=self._kind, options=asdict(self._options)))
        self._say(url, _Line(request))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._ended(url)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise heard(answer["error"])
        return answer

    def _say(self, url: str, what: _Line) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._ended(url)

    def _ended(self, url: str) -> NoReturn:
        process = self._process
        code = process.wait() if process is not None else None
        self.close()
        raise SourceError(f"{ObjectAddress(url)}: the process that asks for it has ended (exit code {code}); is there memory left?")


def _spawn() -> subprocess.Popen[bytes]:
    """Start the process: this interpreter, this package (a module of the user's can't shadow it)."""
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline.stores.objects"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        process_group=0,  # Ctrl-C is for the trainer
    )
