"""Where finished files go: a folder, or a place in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shardify.config.models import BuildConfig
from shardify.config.places import ObjectUrl
from shardify.sinks import objects
from shardify.sinks.folder import FolderSink, FolderView
from shardify.sinks.lease import NAME as LEASE
from shardify.sinks.remote import ObjectSink
from shardify.sinks.uploads import HELD_SHARDS


class View(Protocol):
    """What lies where a set goes."""

    def sizes(self) -> Mapping[str, int]:
        """Return the files' bytes by name; a folder's name ends in a slash."""

    def read(self, name: str) -> bytes:
        """Return a file's bytes."""


def open_sink(config: BuildConfig, *, force: bool, resume: bool) -> FolderSink:
    """Return where a build's files go; raises SettingsError where there is no library to write there."""
    splits, out = tuple(config.splits), config.shards.out
    if isinstance(out, ObjectUrl):
        return ObjectSink(out, config.store, config.folder, splits, force=force, resume=resume)
    return FolderSink(out, splits, force=force, resume=resume)


def view(config: BuildConfig) -> View:
    """Return what is there now; raises SettingsError as `open_sink` does."""
    out = config.shards.out
    return objects.connect(out, config.store) if isinstance(out, ObjectUrl) else FolderView(out)


def held_shards(config: BuildConfig) -> int | None:
    """Return how many shards lie on this machine's disks at once; None: all of them."""
    return HELD_SHARDS if isinstance(config.shards.out, ObjectUrl) else None


__all__ = ["LEASE", "FolderSink", "View", "held_shards", "open_sink", "view"]
