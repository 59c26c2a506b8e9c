"""The server behind `struck.Strikes`: forks a process for each job that stdin names, which builds and strikes itself."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from struck import CRASHED, Job, Strike

OPERATIONS = [
    "mkdir",
    "rmdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "truncate",
    "ftruncate",
    "fsync",
    "fdatasync",
    "write",
    "pwrite",
]
_write = os.write


class _Build:
    """The build in its own process: notes what it does, and strikes when the moment comes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._strike = Strike(**job.strike)
        self._watched = tuple(job.watched)
        self._lock = threading.Lock()
        self._seen = self._pictures = self._kept = 0
        self._phase = "starting"
        self._struck = not job.strike
        self.note(there={str(path): path.stat().st_size for folder in self._watched for path in Path(folder).rglob("*")})

    def note(self, **event: Any) -> None:
        """Write an event to the log: a process that is killed has written it."""
        _write(self._log, json.dumps(event).encode() + b"\n")

    @contextmanager
    def shown(self) -> Iterator[_Build]:
        """Stand in for the command line's progress."""
        yield self

    def begin(self, doing: str, total: int, unit: str = "images") -> None:
        """Take a phase's beginning as a moment."""
        if self._phase != "starting":
            self.note(ended=self._phase, pictures=self._pictures)
        self._phase, self._pictures = doing, 0
        self.note(phase=doing, total=total)
        self._meet()

    def advance(self, size: int) -> None:
        """Take a picture as a moment."""
        self._pictures += 1
        self._meet()

    def watch(self) -> None:
        """Take every operation on the watched folders as a moment."""
        for name in OPERATIONS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            path = _named(target, options.get("dir_fd"))
            if not path.startswith(self._watched):
                return operation(target, *arguments, **options)
            hit = self._counts(name, path)
            facts = self._facts(name, path, arguments)  # before: what another thread writes meanwhile isn't what this fsync keeps
            if hit and self._strike.how == "tear":
                operation(target, arguments[0][: len(arguments[0]) // 2], *arguments[1:])
            if hit and not self._strike.after:
                self._do()
            made = operation(target, *arguments, **options)
            self.note(operation=name, at=self._phase, **facts)
            if hit and self._strike.after:
                self._do()
            return made

        return call

    def _facts(self, name: str, path: str, arguments: Sequence[Any]) -> dict[str, Any]:
        if name in {"rename", "replace"}:
            new = os.path.abspath(arguments[0])  # noqa: PTH100
            return {"path": path, "to": new, "replaced": self._keep(new) if os.path.exists(new) else ""}  # noqa: PTH110
        status = os.stat(path) if os.path.exists(path) else None  # noqa: PTH110, PTH116
        return {"path": path, "size": status.st_size if status else 0, "folder": os.path.isdir(path)}  # noqa: PTH112

    def _keep(self, path: str) -> str:
        """Keep a copy of a file that is about to be replaced; return its path."""
        self._kept += 1
        return shutil.copyfile(path, f"{self._job.log}.{self._kept}")

    def _counts(self, name: str, path: str) -> bool:
        strike = self._strike
        wanted = strike.operation in {name, "any"} and path.endswith(strike.name) and strike.phase in {"", self._phase}
        with self._lock:
            self._seen += wanted
            return wanted and not self._struck and self._seen == strike.count

    def _meet(self) -> None:
        strike = self._strike
        if not self._struck and not strike.operation and (strike.phase, strike.count) == (self._phase, self._pictures):
            self._do()

    def _do(self) -> None:
        self._struck = True
        strike = self._strike
        self.note(struck=strike.how, at=self._phase, pictures=self._pictures, time=time.monotonic())
        match strike.how:
            case "kill" | "tear":
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "fill":
                _fill(Path(strike.path))
            case "remove":
                Path(strike.path).unlink()
            case "cut":
                os.truncate(strike.path, Path(strike.path).stat().st_size - 1)


class _Ticks:
    """Stands in for a module's `time`: the same moments in each run, however fast the machine is."""

    def __init__(self) -> None:
        self._looks = itertools.count(1.0)

    def monotonic(self) -> float:
        """Return the number of the look."""
        return next(self._looks)


def _named(target: Any, folder: int | None) -> str:
    """Return the path that an operation is given: as such, within an open folder, or as an open file."""
    if hasattr(target, "fileno"):
        target = target.fileno()
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")  # noqa: PTH115
    within = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else ""  # noqa: PTH115
    return os.path.abspath(os.path.join(within, target))  # noqa: PTH100, PTH118


def _fill(path: Path) -> None:
    """Leave no free block on a file system."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with suppress(OSError):
        while True:
            _write(descriptor, bytes(4096))


def _run(job: Job) -> int:
    """Run a build in this process; return its exit code."""
    from shardify import build, console
    from shardify.config import BuildConfig
    from shardify.errors import DataError, ShardifyError

    struck = _Build(job)
    for name, value in job.constants.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, Path(value) if isinstance(value, str) else value)
    for module in job.ticking:
        importlib.import_module(module).time = _Ticks()  # type: ignore[attr-defined]
    for name, most in job.limits.items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    struck.watch()
    try:
        if job.command:
            console.progress = struck.shown
            return _command(job.command)
        build.build(BuildConfig.model_validate(job.config), **job.arguments, skipped_to=None, progress=struck)
    except ShardifyError as error:
        problems = error.problems if isinstance(error, DataError) else ()
        struck.note(error="\n".join([f"{type(error).__name__}: {error}", *problems, *getattr(error, "__notes__", ())]))
        return error.exit_code
    except KeyboardInterrupt:
        struck.note(error="KeyboardInterrupt")
        return 130
    struck.begin("ended", 0)
    return 0


def _command(arguments: Sequence[str]) -> int:
    from shardify import __main__ as shell

    sys.argv = ["shardify", *arguments]
    try:
        shell.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _fork(job: Job) -> int:
    """Run a job in a process of its own; return its exit code, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = CRASHED
    try:
        output = os.open(Path(job.log).with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = _run(job)
        _write(os.open(job.log, os.O_WRONLY | os.O_APPEND), json.dumps({"left": code, "time": time.monotonic()}).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    """Fork a process for each line of stdin, one after the other."""
    for module in ("shardify.__main__", "shardify.build", "shardify.console"):
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        print(_fork(Job(**json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
