"""Keeps what was fetched from afar in a folder: bounded, shared, safe against kills.

folder ── entry ── layout        for the process that fetches; naming: files get their names
          reader ─┘              for workers
"""

from pipeline.stores.cache.entry import Claim, Entry
from pipeline.stores.cache.folder import Cache, Held, Lease, default_folder, folder_of, object_path
from pipeline.stores.cache.layout import CHUNK, Facts
from pipeline.stores.cache.reader import AbsentError, CachedFile

__all__ = [
    "CHUNK",
    "AbsentError",
    "Cache",
    "CachedFile",
    "Claim",
    "Entry",
    "Facts",
    "Held",
    "Lease",
    "default_folder",
    "folder_of",
    "object_path",
]
