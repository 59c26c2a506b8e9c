"""A hard disk in software: an ext4 file system whose every cold read costs what a 7200 rpm drive would charge.

    drive.py up DIR [--size 16G] [--rate 156e6] ...   start it; the file system is DIR/mnt
    drive.py cold DIR                                 write back, forget its cached pages (mounts it anew), zero the counters
    drive.py stats DIR                                requests, seeks, bytes, seek and transfer seconds since `cold`; write_* apart
    drive.py down DIR                                 unmount and stop; the image stays, `up` brings it back

How: a FUSE file serves the image of a disk; a loop device with direct I/O sits on it, a real ext4 on that. Layout, inodes,
read-ahead, elevator and page cache are the kernel's own; only the time that a request takes is modelled:

    seek = settle + stroke * sqrt(distance / size * span), then the wait until the sector comes round
    a gap forward of up to half a track is read through (gap / rate, the drive's own buffer), and is no seek
    time = seek + bytes / rate;  of the requests that wait, the one soonest reached is served next (as NCQ does)

The defaults are a desktop drive's data sheet (156 MB/s, 8.5 ms average seek over the whole stroke) on which the data fills
`span` = 5 % of the stroke: about 140 MB/s in sequence, 155 random 4 KiB reads/s at depth 1, 300 at depth 16.
Needs root, fuse3, util-linux, e2fsprogs and `pip install mfusepy`. Sleeps are real: measure ratios, on a quiet machine.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

COUNTERS = ("requests", "seeks", "bytes", "seek_s", "transfer_s")
WRITES = tuple(f"write_{name}" for name in COUNTERS)


class Model(NamedTuple):
    """What a drive charges: bytes, bytes/s, seconds a turn, to settle and for the whole stroke, of which the bytes span a share."""

    size: float
    rate: float = 156e6
    turn: float = 60 / 7200
    settle: float = 0.001
    stroke: float = 0.014
    span: float = 0.05

    def reads_through(self, head: int, offset: int) -> bool:
        """Tell whether bytes lie so near before the head that it needn't move."""
        return 0 <= offset - head <= self.rate * self.turn / 2

    def positioning(self, head: int, offset: int, now: float) -> float:
        """Return the seconds until the head is where bytes begin."""
        if self.reads_through(head, offset):
            return (offset - head) / self.rate
        seek = self.settle + self.stroke * math.sqrt(abs(offset - head) / self.size * self.span)
        track, angle = self.rate * self.turn, (now + seek) / self.turn % 1
        return seek + (offset / track % 1 - angle) % 1 * self.turn


def serve(image: Path, mountpoint: Path, options: argparse.Namespace) -> None:
    """Serve `image` as the FUSE file `disk` with the drive's timing; `stats` beside it reads and resets the counters."""
    import mfusepy as fuse  # noqa: PLC0415  (only the server needs it)

    class Drive(fuse.Operations):
        use_ns = True

        def __init__(self) -> None:
            self.fd = os.open(image, os.O_RDWR)
            self.size = os.fstat(self.fd).st_size
            self.model = Model(self.size, options.rate, 60.0 / options.rpm, options.settle, options.stroke, options.span)
            self.head = 0
            self.free_at = time.perf_counter()
            self.waiting: list[tuple[int, threading.Event]] = []
            self.busy = False
            self.turnstile = threading.Lock()
            self.count = dict.fromkeys(COUNTERS + WRITES, 0.0)

        def service(self, offset: int, length: int, kind: str = "") -> None:
            ticket = (offset, threading.Event())
            with self.turnstile:
                if self.busy:
                    self.waiting.append(ticket)
                else:
                    self.busy = True
                    ticket[1].set()
            ticket[1].wait()
            now = time.perf_counter()
            start = max(now, self.free_at) if now - self.free_at < 0.0005 else now  # back to back: no gap for our own overhead
            seek, transfer = self.model.positioning(self.head, offset, start), length / options.rate
            self.count[kind + "requests"] += 1
            self.count[kind + "seeks"] += not self.model.reads_through(self.head, offset)
            self.count[kind + "bytes"] += length
            self.count[kind + "seek_s"] += seek
            self.count[kind + "transfer_s"] += transfer
            self.free_at, self.head = start + seek + transfer, offset + length
            time.sleep(max(0.0, self.free_at - time.perf_counter()))
            with self.turnstile:  # the next one alone is woken: to wake all that wait cost more CPU than their bytes
                self.busy = bool(self.waiting)
                if self.waiting:
                    now = time.perf_counter()
                    soonest = min(self.waiting, key=lambda t: self.model.positioning(self.head, t[0], now))
                    self.waiting.remove(soonest)
                    soonest[1].set()

        def report(self) -> bytes:
            return (json.dumps({k: round(v, 2) for k, v in self.count.items()}) + "\n").ljust(400).encode()

        def getattr(self, path: str, fh: int | None = None) -> dict:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            sizes = {"/disk": self.size, "/stats": 400}
            if path not in sizes:
                raise fuse.FuseOSError(errno.ENOENT)
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": sizes[path]}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", "disk", "stats"]

        def open(self, path: str, flags: int) -> int:
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            if path == "/stats":
                return self.report()[offset : offset + size]
            self.service(offset, size)
            return os.pread(self.fd, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            if path == "/stats":
                self.count = dict.fromkeys(COUNTERS + WRITES, 0.0)
                return len(data)
            if not options.free_writes:
                self.service(offset, len(data), "write_")
            return os.pwrite(self.fd, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            return 0

    fuse.FUSE(Drive(), str(mountpoint), foreground=True)


def run(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout.strip()


def up(home: Path, options: argparse.Namespace) -> None:
    fuse_dir, mount, image = home / "fuse", home / "mnt", home / "disk.img"
    if mount.is_mount() or (fuse_dir / "disk").exists():
        sys.exit(f"{home}: this drive is up already; `drive.py down {home}` ends it")
    for d in (fuse_dir, mount):
        d.mkdir(parents=True, exist_ok=True)
    fresh = not image.exists()
    if fresh:
        run("truncate", "-s", options.size, image)
    passed = [f"--{k.replace('_', '-')}={getattr(options, k)}" for k in ("rate", "rpm", "settle", "stroke", "span")]
    if options.free_writes:
        passed.append("--free-writes")
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(home), *passed], stdout=log, stderr=log, start_new_session=True
        )
    for _ in range(100):
        if (fuse_dir / "disk").exists():
            break
        time.sleep(0.1)
    else:
        sys.exit(f"the drive did not start: see {home / 'server.log'}")
    loop = run("losetup", "-f", "--show", "--direct-io=on", fuse_dir / "disk")
    (home / "state.json").write_text(json.dumps({"loop": loop, "pid": server.pid}))
    if fresh:
        run("mkfs.ext4", "-q", "-F", loop)
    run("mount", loop, mount)
    queue = Path("/sys/block", Path(loop).name, "queue")
    for name, value in {"rotational": "1", "scheduler": "mq-deadline", "read_ahead_kb": "128"}.items():
        (queue / name).write_text(value)
    print(mount)


def down(home: Path) -> None:
    state = json.loads((home / "state.json").read_text())
    for _ in range(20):  # a process that was just killed may have a file of it open
        if not subprocess.run(["umount", home / "mnt"], capture_output=True, check=False).returncode:
            break
        time.sleep(0.5)
    else:
        sys.exit(f"{home / 'mnt'}: still in use: see `fuser -vm {home / 'mnt'}`, end those and `down` again")
    run("losetup", "-d", state["loop"])
    time.sleep(0.5)
    run("fusermount3", "-u", home / "fuse")
    (home / "state.json").unlink()


def cold(home: Path) -> None:
    """Forget what the kernel holds of this drive, and of nothing else, by mounting it anew; a busy drive drops the whole page cache."""
    state = json.loads((home / "state.json").read_text())
    os.sync()
    for _ in range(10):  # a program that has just ended may still be letting go of a file
        if not subprocess.run(["umount", home / "mnt"], capture_output=True, check=False).returncode:
            run("mount", state["loop"], home / "mnt")
            break
        time.sleep(0.2)
    else:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        print("in use: the whole page cache was dropped, the drive wasn't mounted anew")
    (home / "fuse" / "stats").write_text("0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("up", "down", "cold", "stats", "serve"))
    parser.add_argument("dir", type=Path)
    parser.add_argument("--size", default="16G")
    parser.add_argument("--rate", type=float, default=156e6, help="bytes/s under the head")
    parser.add_argument("--rpm", type=float, default=7200)
    parser.add_argument("--settle", type=float, default=0.001, help="seconds")
    parser.add_argument("--stroke", type=float, default=0.014, help="seconds for the whole stroke")
    parser.add_argument("--span", type=float, default=0.05, help="share of the stroke that the image spans")
    parser.add_argument("--free-writes", action="store_true", help="writes cost nothing")
    options = parser.parse_args()
    home = options.dir.resolve()
    if options.verb == "up":
        up(home, options)
    elif options.verb == "down":
        down(home)
    elif options.verb == "cold":
        cold(home)
    elif options.verb == "stats":
        print((home / "fuse" / "stats").read_text().strip())
    else:
        serve(home / "disk.img", home / "fuse", options)


if __name__ == "__main__":
    main()
