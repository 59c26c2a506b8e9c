"""Hands out a text file in blocks of whole lines, and the lines of a block as the csv module takes them."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import TextIO

_BLOCK_CHARACTERS = 1 << 18  # of larger ones numpy makes arrays that are mapped anew each time: 0.28 us a row instead of 0.10


class Blocks:
    """The text of a file, opened with newline="", in blocks that end where a line does: after LF, CR LF, or a CR alone."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._held = ""

    def take(self) -> str:
        """Return the next block, about 256 KiB or a single line; empty at the end of the file."""
        wanted = _BLOCK_CHARACTERS
        while read := self._file.read(wanted):
            self._held += read
            # A CR at the very end may be half a line end.
            end = self._held.rfind("\n") + 1 or self._held.rfind("\r", 0, len(self._held) - 1) + 1
            if end:
                block, self._held = self._held[:end], self._held[end:]
                return block
            wanted *= 2  # a line of many MiB: else its beginning is copied for each
        block, self._held = self._held, ""
        return block

    def give_back(self, text: str) -> None:
        """Take back what follows the lines that were used: it begins the next block."""
        self._held = text + self._held


class Lines:
    """The lines of a block and, where a record goes on behind its end, of the next one.

    `at_end` says that a block's last line was handed out: a record that ends there ends the block.
    """

    def __init__(self, block: str, blocks: Blocks) -> None:
        self._block = block
        self._blocks = blocks
        self._left: Iterator[str] = iter(())
        self.at_end = not block

    def __iter__(self) -> Iterator[str]:
        block = self._block
        while block:
            # Lines end at \n, \r and \r\n alone, as those of a file do; str.splitlines knows others.
            lines = list(StringIO(block, newline=""))
            self._left = iter(lines)
            for number, line in enumerate(self._left, 1):
                self.at_end = number == len(lines)
                yield line
            block = self._blocks.take()

    def rest(self) -> str:
        """Return what wasn't handed out of the block; nothing is handed out after that."""
        return "".join(self._left)
