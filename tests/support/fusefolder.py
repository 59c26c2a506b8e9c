"""A folder of files served by FUSE, whose pages the kernel throws away at each open; speaks the kernel's protocol, needs root only.

    fusefolder.py SOURCE MOUNTPOINT [--rate BYTES_A_SECOND] [--keep]

Ends when its stdin closes, and unmounts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_HEADER = struct.Struct("<IIQQIIIHH")
_LOOKUP, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH, _INIT = 1, 3, 14, 15, 17, 18, 25, 26
_OPENDIR, _READDIR, _RELEASEDIR = 27, 28, 29
_SILENT = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_KEEP_CACHE, _ASYNC_READ = 2, 1
_ROOT = 1


class Server:
    """Serves one folder, without folders in it."""

    def __init__(self, source: Path, rate: float, keep: bool) -> None:
        self.source, self.rate, self.keep = source, rate, keep
        self.names = sorted(os.listdir(source))
        self.open: dict[int, int] = {}

    def attributes(self, node: int) -> bytes:
        """Return the kernel's attributes of the root or of a file, numbered from 2."""
        status = (self.source if node == _ROOT else self.source / self.names[node - 2]).stat()
        times = (int(status.st_atime), int(status.st_mtime), int(status.st_ctime), 0, 0, 0)
        mode = 0o40755 if node == _ROOT else 0o100644
        return struct.pack("<QQQQQQIIIIIIIIII", node, status.st_size, status.st_size // 512, *times, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        """Return the answer to a request; raises OSError with the number that is the kernel's answer."""
        answers = {_INIT: self.init, _LOOKUP: self.look_up, _OPEN: self.opened, _READ: self.read, _READDIR: self.listing}
        if code in answers:
            return answers[code](node, body)
        if code == _GETATTR:
            return struct.pack("<QII", 3600, 0, 0) + self.attributes(node)
        if code == _OPENDIR:
            return struct.pack("<QII", 0, 0, 0)
        if code == _STATFS:
            return struct.pack("<QQQQQIIII24x", 10**6, 10**5, 10**5, 100, 0, 4096, 255, 4096, 0)
        if code in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "unknown")

    def init(self, _node: int, body: bytes) -> bytes:
        """Agree on the protocol."""
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, struct.unpack_from("<III", body)[2], _ASYNC_READ, 16, 12, 2**17, 1, 32, 0, 0)

    def look_up(self, node: int, body: bytes) -> bytes:
        """Find a name."""
        name = os.fsdecode(body.rstrip(b"\0"))
        if node != _ROOT or name not in self.names:
            raise FileNotFoundError(errno.ENOENT, name)
        found = self.names.index(name) + 2
        return struct.pack("<QQQQII", found, 0, 3600, 3600, 0, 0) + self.attributes(found)

    def opened(self, node: int, _body: bytes) -> bytes:
        """Open a file: without the flag the kernel throws its pages away."""
        if node not in self.open:
            self.open[node] = os.open(self.source / self.names[node - 2], os.O_RDONLY)
        return struct.pack("<QII", node, _KEEP_CACHE if self.keep else 0, 0)

    def read(self, node: int, body: bytes) -> bytes:
        """Read a file, no faster than asked for."""
        _, offset, size = struct.unpack_from("<QQI", body)
        if self.rate:
            time.sleep(size / self.rate)
        return os.pread(self.open[node], size, offset)

    def listing(self, _node: int, body: bytes) -> bytes:
        """Return directory entries from the offset on, as many as fit a page."""
        found, after = b"", struct.unpack_from("<QQI", body)[1]
        for at, name in enumerate(self.names[after:], after):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", at + 2, at + 1, len(raw), 8) + raw
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > 4096:
                break
            found += entry
        return found


def serve(device: int, server: Server) -> None:
    """Answer the kernel until stdin closes."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    while not any(ready == sys.stdin.fileno() for ready, _ in poll.poll()):
        try:
            request = os.read(device, 2**18)
        except OSError:
            return  # unmounted
        _, code, unique, node, *_ = _HEADER.unpack_from(request)
        if code in _SILENT:
            continue
        try:
            data, number = server.answer(code, node, request[_HEADER.size :]), 0
        except OSError as error:
            data, number = b"", -(error.errno or errno.EIO)
        with contextlib.suppress(FileNotFoundError):  # the request was interrupted
            os.write(device, struct.pack("<IiQ", 16 + len(data), number, unique) + data)


@contextlib.contextmanager
def mounted(source: Path, point: Path, *, rate: float = 0.0, keep: bool = False) -> Iterator[Path]:
    """Serve `source` at `point`; skips the test where that isn't allowed."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or shutil.which("umount") is None:
        pytest.skip("mounts a FUSE file system: needs root and /dev/fuse")
    point.mkdir(exist_ok=True)
    command = [sys.executable, __file__, source, point, "--rate", str(rate), *(["--keep"] if keep else [])]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        if server.stdout.readline() != "up\n":
            pytest.skip("a FUSE file system can't be mounted here")
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=False, capture_output=True)
        server.stdin.close()
        server.wait(10)
        server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("point", type=Path)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    device = os.open("/dev/fuse", os.O_RDWR)
    told = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fusefolder", os.fsencode(options.point), b"fuse", 6, told.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("up", flush=True)
    serve(device, Server(options.source, options.rate, options.keep))


if __name__ == "__main__":
    main()
