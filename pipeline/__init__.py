"""Stream shards into training batches, at the speed of the CPU.

    loader = pipeline.make_loader("shards/sample", batch_size=64, transform=transform)
    for images, labels in loader: ...

Nothing heavy is imported before a name is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.augment import sample_generators
    from pipeline.datasets import WebDataset
    from pipeline.errors import (
        ChangedError,
        DecodeError,
        DeniedError,
        MissingError,
        OptionsError,
        PipelineError,
        RemoteError,
        SampleError,
        ShardError,
        SkippedError,
        SourceError,
        TransformError,
        UncountedError,
        WorkerError,
    )
    from pipeline.items import Batch, KeyedBatch
    from pipeline.loader import Loader, make_loader
    from pipeline.mapped import ShardDataset
    from pipeline.options import LoaderOptions
    from pipeline.stores.http import HttpOptions
    from pipeline.stores.objects import ObjectOptions

__all__ = [
    "Batch",
    "ChangedError",
    "DecodeError",
    "DeniedError",
    "HttpOptions",
    "KeyedBatch",
    "Loader",
    "LoaderOptions",
    "MissingError",
    "ObjectOptions",
    "OptionsError",
    "PipelineError",
    "RemoteError",
    "SampleError",
    "ShardDataset",
    "ShardError",
    "SkippedError",
    "SourceError",
    "TransformError",
    "UncountedError",
    "WebDataset",
    "WorkerError",
    "make_loader",
    "sample_generators",
]

_HOMES = {
    "Batch": "items",
    "KeyedBatch": "items",
    "Loader": "loader",
    "HttpOptions": "stores.http",
    "LoaderOptions": "options",
    "ObjectOptions": "stores.objects",
    "ShardDataset": "mapped",
    "WebDataset": "datasets",
    "make_loader": "loader",
    "sample_generators": "augment",
}
_TRAIN = ("torch", "webdataset", "albumentations")


def __getattr__(name: str) -> Any:
    """Import a public name's module when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES and importlib.util.find_spec("fcntl") is None:
        raise ImportError(f"pipeline.{name}: {sys.platform} isn't supported: it has no locks of POSIX; use WSL 2 under Windows")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in _TRAIN:
            raise ModuleNotFoundError(
                f"pipeline.{name} needs {error.name}, which packing alone doesn't: pip install 'shardify[train]' "
                "(in a clone: pip install -c constraints.txt -e '.[train]', or make example)",
                name=error.name,
            ) from error
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
