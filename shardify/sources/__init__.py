"""What a source holds: the rows of a table, or the pictures of class folders, as checked items."""

from __future__ import annotations

import os

from shardify.config import BuildConfig, CsvSource
from shardify.errors import SettingsError, StorageError
from shardify.items import Items
from shardify.sources.folders import read_folders
from shardify.sources.labels import unseen_classes
from shardify.sources.rows import read_rows

__all__ = ["read", "unseen_classes"]


def read(config: BuildConfig) -> Items:
    """Read a build's source; where splits are shares, every row is left out until they are drawn (`order.draw_splits`).

    Raises SettingsError for settings that don't fit the source, DataError that lists all that is wrong with it.
    """
    source = config.source
    try:
        os.scandir(source.root).close()
    except (FileNotFoundError, NotADirectoryError):
        raise SettingsError(f"source.root {source.root}: no such folder; give the data's folder with --source") from None
    except OSError as error:
        raise StorageError(f"{source.root}: can't be listed ({error.strerror}); check the disk and the permissions") from error
    return read_rows(config, source) if isinstance(source, CsvSource) else read_folders(config, source)
