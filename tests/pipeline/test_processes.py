"""However a trainer ends, nothing of it is left: no process, no shared memory, no lock, no temporary file; the next one starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doomed import MARK
from packing import PackedSet
from residence import is_read

TRAINER = Path(__file__).parents[1] / "support" / "doomed.py"
METHODS = ("fork", "forkserver", "spawn")
LONGEST = 60  # seconds to wait for what has to come; a hang is a failure


class Trainer:
    """A trainer in a session of its own, with its own folders for temporary files and caches."""

    def __init__(self, folder: Path, scratch: Path, ending: str, *methods: str, wrap: Sequence[str] = ()) -> None:
        self.mark, self._shared = uuid.uuid4().hex, set[Path]()
        self.folder, self.temporary = folder, Path(tempfile.mkdtemp(prefix="t"))  # sockets in it: their paths must be short
        environment = os.environ | {
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(scratch / "cache"),
        }
        self._errors = (scratch / f"{self.mark}.err").open("w+")
        self.process = subprocess.Popen(
            [*wrap, sys.executable, str(TRAINER), str(folder), ending, *methods],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,  # else `say` takes lines into a buffer that `communicate` doesn't look into
            start_new_session=True,
        )

    def say(self) -> dict[str, Any]:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors()
        found: dict[str, Any] = json.loads(line)
        for pid in self.alive():
            self._shared |= shared_files(int(pid))
        return found

    def end(self) -> list[dict[str, Any]]:
        """Wait for its end; return all further lines that it prints."""
        output, _ = self.process.communicate(timeout=LONGEST)
        return [json.loads(line) for line in output.splitlines()]

    def errors(self) -> str:
        """Return what it wrote to stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def alive(self) -> dict[str, str]:
        """Return its processes that are there, and their command lines."""
        mark, found = f"{MARK}={self.mark}".encode(), {}
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and mark in (path / "environ").read_bytes().split(b"\0"):
                    found[path.name] = (path / "cmdline").read_bytes().decode()
            except OSError:
                continue
        return found

    def leaves_nothing(self, *, but: str = "") -> None:
        """Check that nothing is left, but what ends with `but`; the last processes may take a moment to go."""
        deadline = time.monotonic() + 10
        while (left := self._left(but)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []

    def _left(self, but: str) -> list[str]:
        """Return what is left of it: processes, shared memory, temporary files, shards that are locked."""
        left = [f"process {pid}: {command}" for pid, command in self.alive().items()]
        left += [str(path) for path in self._shared if path.exists()]
        left += [f"{path}{'/' if path.is_dir() else f': {path.stat().st_size} bytes'}" for path in self.temporary.rglob("*")]
        for shard in self.folder.glob("*.tar"):
            if is_read(shard):
                left.append(f"a lock on {shard}")
        return [what for what in left if not but or not what.endswith(but)]

    def close(self) -> None:
        """Kill what is left of it."""
        for pid in self.alive():
            os.kill(int(pid), signal.SIGKILL)
        self.process.communicate()
        self._errors.close()
        shutil.rmtree(self.temporary)


def shared_files(pid: int) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped."""
    try:
        lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path("/dev/shm" + line.partition("/dev/shm")[2]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


@pytest.fixture
def train(small_set: PackedSet, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Start trainers; what is left of them at the end is killed."""
    begun: list[Trainer] = []

    def begin(ending: str, *methods: str, wrap: Sequence[str] = ()) -> Trainer:
        begun.append(Trainer(small_set.folder, tmp_path, ending, *methods, wrap=wrap))
        return begun[-1]

    yield begin
    for trainer in begun:
        trainer.close()


@pytest.mark.parametrize(("doing", "methods"), [("work", METHODS), ("wait", METHODS[:1])])
@pytest.mark.case("P07")
def test_ctrl_c_ends_all_at_once(train: Callable[..., Trainer], doing: str, methods: Sequence[str]) -> None:
    """Ctrl-C, in the loop's body or while it waits for a batch: one traceback, the trainer's, and nothing is left (P07)."""
    trainer = train(doing, *methods)
    ready = trainer.say()
    assert len(ready["ready"]) == len(methods) < ready["processes"]
    os.killpg(trainer.process.pid, signal.SIGINT)
    trainer.end()
    trainer.leaves_nothing()
    assert trainer.process.returncode == -signal.SIGINT
    assert trainer.errors().count("Traceback") == 1, trainer.errors()
    assert trainer.errors().rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_trainer_takes_all_with_it(train: Callable[..., Trainer], number: int) -> None:
    """A trainer that can't clean up any more leaves no worker, however it was started, and no file."""
    trainer = train("work", *METHODS)
    trainer.say()
    assert trainer._shared  # what is looked for afterwards
    trainer.process.send_signal(number)
    trainer.end()
    trainer.leaves_nothing()
    assert trainer.errors().count("Traceback") == 0, trainer.errors()


def test_an_exception_in_the_trainer_and_the_next_run(train: Callable[..., Trainer]) -> None:
    """An exception in the loop's body ends the program with that exception alone, and nothing is left.

    The next run starts; it breaks its loops and ends without closing a loader, leaves nothing and says nothing.
    """
    trainer = train("raise", "forkserver")
    trainer.say()
    trainer.end()
    trainer.leaves_nothing()
    assert trainer.process.returncode == 1
    assert trainer.errors().count("Traceback") == 1, trainer.errors()
    again = train("break", "spawn")
    again.say()
    again.end()
    again.leaves_nothing()
    assert (again.process.returncode, again.errors()) == (0, "")


def test_a_killed_worker_is_named_within_seconds(train: Callable[..., Trainer]) -> None:
    """A worker that is killed raises in the trainer, within seconds and by its number, under each start method."""
    trainer = train("lose workers", *METHODS)
    trainer.say()
    said = trainer.end()
    assert [fact["method"] for fact in said] == list(METHODS)
    for fact in said:
        assert fact["error"] in ("WorkerError", "RuntimeError"), fact
        assert str(fact["worker"]) in fact["text"], fact
        assert fact["error"] == "RuntimeError" or "worker 0" in fact["text"], fact  # torch raises in the loop's body by a signal
        assert fact["seconds"] < 15, fact
    # torch opens a few empty files to see whether it may; its signal handler, which raises, may strike while it does.
    trainer.leaves_nothing(but=": 0 bytes")


@pytest.mark.parametrize("workers", ["persistent", pytest.param("fresh", marks=pytest.mark.slow)])
@pytest.mark.case("P01")
def test_twenty_epochs_with_early_breaks_hold_no_more(train: Callable[..., Trainer], workers: str) -> None:
    """Over 20 epochs that are broken off, memory, open files and processes stay what they were (P01, P06)."""
    trainer = train(workers)
    said = trainer.end()
    assert len(said) == 20, trainer.errors()
    held = [list(fact["processes"].values()) for fact in said]
    resident, files = ([sum(pair[at] for pair in processes) for processes in held] for at in (0, 1))
    assert len({len(processes) for processes in held[5:]}) == 1
    assert min(files[15:]) <= max(files[:10]), files  # a batch on its way may be open, and three more were once; a leak only grows
    assert min(resident[15:]) - min(resident[5:10]) < 10e6, resident
    trainer.leaves_nothing()


def may_mount() -> bool:
    """Tell whether this user may mount a file system in a namespace of its own."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m none /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.case("P03")
def test_too_little_shared_memory_is_found_before_a_batch_is_made(train: Callable[..., Trainer]) -> None:
    """In a container with 64 MB of /dev/shm, batches that don't fit are an error with the numbers; smaller ones work (P03)."""
    if not may_mount():
        pytest.skip("needs the right to mount")
    trainer = train("small", wrap=("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"', "-"))
    large, small = trainer.end()
    assert large["error"] == "OptionsError"
    for part in ("67 MB", "2 workers", "3 batches of 30.7 MB", "184 MB", "--shm-size", "num_workers=0"):
        assert part in large["text"]
    assert small["batches"] == 50
    assert "bus error" not in trainer.errors().lower()
