"""The folder that a set is built in: one build at a time, nobody's files overwritten, nothing left of a build that failed."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardify.errors import FormatError, SettingsError, naming
from shardify.format import card, manifest
from shardify.format.names import PARTIAL, index_name, manifest_name, parse_shard_name

_SHOWN = 10  # names a message lists


class FolderSink:
    """A folder, locked and checked while the `with` block runs.

    Entering raises SettingsError for a folder that holds anything (with `force`: anything but one set, as its manifests name it)
    or that another build writes to. A block that raises leaves nothing of what it wrote for `splits`, nor a folder it made.
    """

    def __init__(self, folder: Path, splits: Sequence[str], *, force: bool = False) -> None:
        self.folder = folder
        self._splits = frozenset(splits)
        self._force = force
        self._made = False
        self._lock = -1
        self._cleared = self._replaced = False

    def __enter__(self) -> FolderSink:
        with naming(self.folder):
            self._open()
            try:
                self._check()
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._replaced:
            error.add_note(f"the set that was in {self.folder} is gone: --force removed it before this one was written")
        if kind is not None and self._cleared:
            with suppress(OSError):  # the first error is the one to report
                self._remove_written()
        self._close()

    def clear(self) -> None:
        """Make the folder empty, where `force` allows it: called when all is ready to be written, not before."""
        with naming(self.folder):
            for path in self._check():
                path.unlink()
                self._replaced = True
        self._cleared = True

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True)
            self._made = True
        except FileExistsError:
            if not self.folder.is_dir():
                raise SettingsError(f"{self.folder} is a file, not a folder; choose another one with --out") from None
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks on folders (NFS): two builds at once are then the user's to avoid
            self._made = False  # the other build's now, even if this one was first to make it
            self._close()
            raise SettingsError(f"another build writes to {self.folder}; wait for it, or choose another folder (--out)") from None

    def _check(self) -> list[Path]:
        """Return the files that `force` may remove, manifests first: what remains when that is cut short isn't taken for a set."""
        present = sorted(path.name for path in self.folder.iterdir())
        if not present:
            return []
        ours = self._ours(present)
        unknown = [name for name in present if name not in ours]
        if not self._force:
            if any(name.endswith(PARTIAL) for name in unknown):
                raise SettingsError(
                    f"{self.folder} holds what a build that was cut off left ({_listed(present)}); no manifest names all of it, so "
                    "remove the folder yourself and build again, or choose another one (--out)"
                )
            what = "holds a set" if any(name.endswith(manifest_name("")) for name in ours) else "isn't empty"
            raise SettingsError(
                f"{self.folder} {what} ({_listed(present)}); choose another folder (--out), or replace a set with --force"
            )
        if unknown:
            raise SettingsError(
                f"{self.folder} holds files that no manifest there names ({_listed(unknown)}), and --force removes none of those; "
                "remove them yourself if they are left from a build that was cut off, or choose another folder (--out)"
            )
        return [self.folder / name for name in ours]

    def _ours(self, present: Sequence[str]) -> list[str]:
        named: list[str] = []
        for name in present:
            if name.endswith(manifest_name("")):
                with suppress(FormatError):
                    shards = [shard.url for shard in manifest.read(self.folder / name).shards if parse_shard_name(shard.url)]
                    named += [name, *shards, *(index_name(shard) for shard in shards)]
        if card.NAME in present and card.is_ours((self.folder / card.NAME).read_bytes()):
            named.append(card.NAME)
        named.sort(key=lambda name: not name.endswith(manifest_name("")))
        allowed = dict.fromkeys([*named, *(name + PARTIAL for name in named)])
        here = set(present)
        return [name for name in allowed if name in here and self._is_file(name)]

    def _is_file(self, name: str) -> bool:
        path = self.folder / name
        return path.is_file() and not path.is_symlink()

    def _remove_written(self) -> None:
        """Remove this run's files: the folder was empty when it began, and it alone writes here."""
        for path in sorted(self.folder.iterdir(), key=lambda path: not path.name.endswith(manifest_name(""))):
            if self._is_written(path.name.removesuffix(PARTIAL)):
                path.unlink()

    def _is_written(self, name: str) -> bool:
        shard = parse_shard_name(name.removesuffix(".idx") + ".tar" if name.endswith(".idx") else name)
        if shard is not None:
            return shard[0] in self._splits
        return name == card.NAME or name in {manifest_name(split) for split in self._splits}

    def _close(self) -> None:
        if self._made:
            with suppress(OSError):  # not empty: it stays
                self.folder.rmdir()
        os.close(self._lock)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
