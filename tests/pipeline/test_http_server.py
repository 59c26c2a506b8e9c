"""The tests' own server: as a process it serves a folder at a given speed, and tells what it was asked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from faulty import Bucket, Faulty

from pipeline.stores.http import HttpOptions, HttpStore

SERVER = Path(__file__).resolve().parent.parent / "support" / "faulty.py"


def test_it_serves_a_folder_as_a_process(tmp_path: Path) -> None:
    """Its log, a line for each request, shows the faults overcome."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.tar").write_bytes(b"x" * 500_000)
    command = [sys.executable, str(SERVER), str(tmp_path), "--share", "0.5", "--seed", "1", "--cut-below", "400000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().strip() + "/sub/a b.tar"
        with HttpStore(HttpOptions(first_wait_seconds=0.001, longest_wait_seconds=0.01, attempts=30)) as store:
            for _ in range(5):
                assert store.fetch(url, 10**6) == b"x" * 500_000
        log, _ = process.communicate()
    requests = [json.loads(line) for line in log.splitlines()]
    assert len(requests) == sum(store.counts.requests.values()) > 5
    assert {request["target"] for request in requests} == {"/sub/a%20b.tar"}


def test_its_link_has_the_speed_that_was_asked_for() -> None:
    """A token bucket: half a second's bytes take half a second, whoever shares the link."""
    with Faulty({"/a": bytes(500_000)}, rate=1e6) as server, HttpStore() as store:
        began = time.monotonic()
        store.fetch(server.url("/a"), 10**6)
        assert 0.35 < time.monotonic() - began < 60
    bucket = Bucket(1000)
    assert 0 <= bucket.wait(50) < 0.1 < bucket.wait(1000) <= 1.1
