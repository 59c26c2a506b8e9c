"""What a process does with one file: reads it and makes of it what is packed, or says why it can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from shardify import encode, faults, ingest
from shardify.encode import Forecast
from shardify.format.picture import PictureError
from shardify.ingest import ChangedFileError, File
from shardify.items import Encoded, Refused

if TYPE_CHECKING:
    from shardify.config.models import Encode

R = TypeVar("R")


def encode_file(root: str, settings: Encode, file: File) -> Encoded | Refused:
    """Return a picture below `root` as it is packed."""
    return _with(root, file, lambda data: encode.encode(data, settings))


def forecast_file(root: str, settings: Encode, file: File) -> Forecast | Refused:
    """Say what `encode_file` will make of a picture, without encoding."""
    return _with(root, file, lambda data: encode.forecast(data, settings))


def _with(root: str, file: File, use: Callable[[bytes], R]) -> R | Refused:
    path = file.path.removeprefix(root).lstrip("/")
    try:
        return use(ingest.read(file))
    except PictureError as error:
        return Refused(path, error.cause, str(error))
    except FileNotFoundError:
        return Refused(path, "missing", "no such file")
    except ChangedFileError as error:
        return Refused(path, "changed", error.strerror or str(error))
    except (OSError, MemoryError) as error:
        cause = "environment" if faults.is_of_the_machine(error) else "unreadable"
        return Refused(path, cause, getattr(error, "strerror", None) or str(error) or "out of memory")
    except ValueError as error:  # a name that no file can have
        return Refused(path, "missing", str(error))
