"""Bytes that one thread brings and another reads as a file, forward only; no more of them are held than fit a buffer."""

from __future__ import annotations

import os
import threading
from collections import deque

_HELD_BYTES = 4 * 2**20  # a link of 1 Gbit/s brings as much while a reader is busy for 30 ms
_HEAD_BYTES = 512  # that can be gone back to: who can't make sense of a beginning looks at it again


class LeftError(Exception):
    """Nobody reads any more."""


class Forward:
    """One end is fed, the other is read; a seek passes over what lies between."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._head = b""
        self._held = self._at = self._begin = 0  # where the reader is, and where the first piece begins
        self._ended = self._left = False
        self._error: BaseException | None = None
        self._moved = threading.Condition()

    def feed(self, data: memoryview) -> None:
        """Hand on the next bytes, once there is room for them; raises LeftError where nobody reads any more."""
        piece = bytes(data)
        with self._moved:
            self._moved.wait_for(lambda: self._left or self._held < _HELD_BYTES)
            if self._left:
                raise LeftError
            self._head += piece[: _HEAD_BYTES - len(self._head)]
            self._pieces.append(piece)
            self._held += len(piece)
            self._moved.notify()

    def end(self, error: BaseException | None = None) -> None:
        """Say that no more comes: that was all, or an error, which the reader is to get."""
        with self._moved:
            self._ended, self._error = True, error
            self._moved.notify()

    def leave(self) -> None:
        """Read no more; a second call does nothing."""
        with self._moved:
            self._left = True
            self._pieces.clear()
            self._moved.notify()

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end; raises what the other end met."""
        head = self._head[self._at : self._at + size] if self._at < self._begin else b""  # after a seek back to the head
        self._at += len(head)
        found = [head]
        while size > (got := sum(map(len, found))) and (piece := self._next(size - got)):
            found.append(piece)
        return b"".join(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, ahead or in the first bytes; what is passed over goes when something is read."""
        if whence != os.SEEK_SET or (offset < self._begin and offset > len(self._head)):
            raise OSError(f"can't go back to byte {offset}")
        self._at = offset
        return offset

    def drain(self) -> int:
        """Pass over all that comes; returns where that ended."""
        while piece := self._next(_HELD_BYTES):
            del piece
        return self._at

    def _next(self, most: int) -> bytes:
        """Return some bytes at the position, at most so many; none at the end."""
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._pieces or self._ended)
                if not self._pieces:
                    if self._error is not None:
                        raise self._error
                    return b""
                piece = self._pieces[0]
                stop = self._begin + len(piece)
                if stop <= self._at or self._at + most >= stop:
                    self._pieces.popleft()
                    self._held -= len(piece)
                    begin, self._begin = self._begin, stop
                    self._moved.notify()
                else:
                    begin = self._begin
            if stop > self._at:
                data = piece[self._at - begin : self._at - begin + most]
                self._at += len(data)
                return data
