"""Tells which kind of store a URL is of, and opens it; knows nothing of shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from os import environ
from typing import TYPE_CHECKING, Final

from pipeline.errors import OptionsError
from pipeline.stores import Findable, Place, RemoteStore

if TYPE_CHECKING:
    from pipeline.stores.http import HttpOptions
    from pipeline.stores.objects import ObjectOptions

# One slash is enough: that is what Path makes of s3://bucket.
_URL = re.compile(r"\s*(https?|s3|gs|az|abfss?):/", re.IGNORECASE)
_KINDS: Final = {"http": "http", "https": "http", "abfs": "az", "abfss": "az"}


def kind_of(text: str) -> str:
    """Return the kind of store that a text of the user's names: http, s3, gs or az; "" where it is no URL that can be read."""
    match = _URL.match(text)
    return "" if match is None else _KINDS.get(match[1].lower(), match[1].lower())


def opened(kind: str, http: HttpOptions | None, objects: ObjectOptions | None) -> RemoteStore:
    """Return a store that reads in this process: one that never forks, if it is an object store.

    Raises OptionsError where the options can't be used, or obstore isn't installed.
    """
    if kind == "http":
        from pipeline.stores.http import HttpStore  # noqa: PLC0415  (each kind needs its own library)

        return HttpStore(http)
    try:
        from pipeline.stores.objects.store import ObjectStore  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise OptionsError(
            f"{kind}:// needs obstore, which isn't installed: pip install 'shardify[cloud]' (in a clone: pip install "
            "-c constraints.txt -e '.[cloud]')"
        ) from None
    return ObjectStore(kind, objects)


def finder(kind: str, http: HttpOptions | None, objects: ObjectOptions | None) -> Findable:
    """Return what finds shards for a process that may fork; raises OptionsError where the options can't be used."""
    if kind == "http":
        return opened(kind, http, objects)
    from pipeline.stores.objects import Finder  # noqa: PLC0415

    return Finder(kind, objects)


def addressing(kind: str, objects: ObjectOptions | None) -> Callable[[str], Place]:
    """Return what takes URLs of a kind apart, with the endpoint that options and environment say; raises OptionsError."""
    if kind == "http":
        from pipeline.stores.http import Address  # noqa: PLC0415

        return Address
    from pipeline.stores.objects import ObjectAddress, ObjectOptions  # noqa: PLC0415
    from pipeline.stores.objects.access import access  # noqa: PLC0415

    return partial(ObjectAddress, place=access(kind, objects or ObjectOptions(), environ).place)
