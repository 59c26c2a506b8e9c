"""The prefetcher as a process: it costs the trainer nothing, hangs nobody when it dies, and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from packing import PackedSet
from prefetching import (
    COUNT,
    SHARDS,
    files_of,
    finished,
    gone,
    keys,
    layout_of,
    options,
    prefetcher_of,
    process_of,
    started,
)
from residence import until

import pipeline
from pipeline.options import LoaderOptions
from pipeline.prefetch import Prefetcher
from pipeline.progress import Block, Count
from pipeline.world import World


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_prefetcher_hangs_nobody(packed: PackedSet, caplog: pytest.LogCaptureFixture, how: signal.Signals) -> None:
    """Killed or stopped in the middle of an epoch, workers read on for themselves, counted; a dead one is started again, and said."""
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=1, options=options(keep_bytes=0)) as loader:
        batches = iter(loader)
        found = list(next(batches).keys)
        prefetcher = prefetcher_of(loader)
        first = process_of(prefetcher)
        os.kill(first, how)
        began = time.monotonic()
        time.sleep(1.1)  # a look a second
        with caplog.at_level(logging.WARNING, "pipeline"):
            found += [key for batch in batches for key in batch.keys]
        told = [record for record in caplog.records if "until the next epoch starts it again" in record.message]
        assert len(told) == (how is signal.SIGKILL)
        assert 1.5 < time.monotonic() - began < 30
        assert sorted(found) == packed.keys
        assert 0 < prefetcher.stats().unprefetched < COUNT // 8
        if how is signal.SIGKILL:
            assert not prefetcher.stats().alive
            with caplog.at_level(logging.WARNING, "pipeline"):
                assert sorted(keys(loader)) == packed.keys
            assert prefetcher.alive and process_of(prefetcher) != first
            assert [record for record in caplog.records if "the prefetcher died" in record.message]
    assert gone(first)


def test_a_killed_trainer_leaves_nothing(packed: PackedSet, tmp_path: Path) -> None:
    """When the trainer is killed its prefetcher ends, though forked workers hold the pipe open; no file is left."""
    program = (
        "import os, sys, time, pipeline\n"
        "loader = pipeline.make_loader(sys.argv[1], batch_size=8, num_workers=2,\n"
        "    options=pipeline.LoaderOptions(decode='none', multiprocessing_context='fork'))\n"
        "next(iter(loader))\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60)\n"
        "print(loader._reading._prefetcher._process[0].pid, child, flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    trainer = subprocess.Popen([sys.executable, "-c", program, packed.folder], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert trainer.stdout is not None
    prefetcher, holder = map(int, trainer.stdout.readline().split())
    assert not gone(prefetcher)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until(lambda: gone(prefetcher))
    assert not gone(holder)
    os.kill(holder, signal.SIGKILL)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "pipeline" in name}
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_the_trainers(packed: PackedSet) -> None:
    """An interrupt of the terminal's group doesn't reach the prefetcher, which ends when it is told to."""
    with started(files_of(packed.folder), layout_of()) as (prefetcher, block):
        process = process_of(prefetcher)
        until(lambda: block.count(Count.PID) == process)
        assert os.getpgid(process) != os.getpgid(0)
        os.kill(process, signal.SIGINT)
        prefetcher.begin(1, 0, 0)
        until(lambda: finished(block, layout_of()))
    assert gone(process)


def test_a_loader_that_nobody_closed_ends_its_prefetcher(packed: PackedSet) -> None:
    """Collected, or at the interpreter's end, a prefetcher's process goes with its loader."""
    block = Block.make()
    prefetcher = Prefetcher.start(layout_of(), files_of(packed.folder), LoaderOptions(), World(), block)
    process = process_of(prefetcher)
    del prefetcher
    assert gone(process)
    block.close()


def test_the_trainers_python_pays_nothing(packed: PackedSet) -> None:
    """No thread is started in the trainer, its workers' dataset pickles, and the prefetcher imports neither torch nor webdataset."""
    threads = threading.active_count()
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=0, options=options()) as loader:
        next(iter(loader))
        assert threading.active_count() == threads
        assert len(pickle.dumps(loader.dataset)) < 10_000
        mapped = Path(f"/proc/{process_of(prefetcher_of(loader))}/maps").read_text()
        assert "libtorch" not in mapped and "numpy" in mapped
        status = Path(f"/proc/{process_of(prefetcher_of(loader))}/status").read_text()
        assert "Threads:\t1\n" in status


def test_a_users_own_pipeline_cannot_shadow_it(packed: PackedSet, tmp_path: Path) -> None:
    """A pipeline.py beside the user's script, or on PYTHONPATH, isn't run in the prefetcher's place."""
    (tmp_path / "pipeline.py").write_text("raise SystemExit('shadowed')\n")
    root = str(Path(pipeline.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "import pipeline\n"
        "loader = pipeline.make_loader(sys.argv[1], batch_size=8, num_workers=0, options=pipeline.LoaderOptions(decode='none'))\n"
        "for batch in loader: pass\n"
        "found = loader._reading._prefetcher.stats()\n"
        "print(found.alive, found.unprefetched)\n"
        "loader.close()\n"
    )
    (tmp_path / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "train.py", packed.folder],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "0"], done.stderr


def test_without_an_interpreter_workers_read(
    packed: PackedSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the process can't be started that is said, and training goes on."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        caplog.at_level(logging.WARNING, "pipeline"),
        pipeline.make_loader(packed.folder, batch_size=8, num_workers=0, options=options()) as loader,
    ):
        assert sorted(keys(loader)) == packed.keys
    assert any("can't be started" in record.message for record in caplog.records)


def test_epochs_leave_no_descriptors(packed: PackedSet) -> None:
    """Twenty epochs with early breaks: neither trainer nor prefetcher holds more files than after the first."""
    with pipeline.make_loader(packed.folder, batch_size=8, num_workers=0, options=options(keep_bytes=0)) as loader:
        next(iter(loader))
        process = process_of(prefetcher_of(loader))
        until(lambda: _descriptors(process) > 3)
        trainer = _descriptors(os.getpid())
        for _ in range(20):
            next(iter(loader))
        assert _descriptors(os.getpid()) <= trainer + 1
        # Pipe, plan, block, output; the turn's; shards, one index. While it reads it may hold one more for a moment.
        until(lambda: _descriptors(process) <= 6 + SHARDS + 2)


def _descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))
