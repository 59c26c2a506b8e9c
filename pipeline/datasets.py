"""Gives raw samples in this project's order under webdataset's interface: `WebDataset`, for programs that use `wds.WebDataset`.

    blocks of samples -> worker w of n takes w, w + n, ... -> decode, map, to_tuple, batched, ...: webdataset's own methods

With `.batched(block)` the batches don't depend on the number of workers. Ranks share each epoch by the rank rule, with the block
as the batch; no state is kept: what can be resumed is `make_loader`.
"""

from __future__ import annotations

import difflib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import webdataset as wds
from webdataset import autodecode, filters

from pipeline.arrival import ArrivalSettings
from pipeline.blocks import Blocks
from pipeline.epoch import fold
from pipeline.errors import DecodeError, OptionsError, PipelineError, UncountedError
from pipeline.items import Sample
from pipeline.options import MAX_LANES, check_int, field_names
from pipeline.survey import survey
from pipeline.urls import refuse_remote, resolve

_SEED_LIMIT = 2**64 - 1
_EPOCH_LIMIT = 2**63 - 1
_BUFFER = 7  # what draws are for; epoch.py and arrival.py have 1 to 6
_PICKLES = ("pkl", "pickle", "pyd", "pth")
_ORDERED = "the order is shuffled, by seed; shuffle=False reads in storage order"
_SPLIT = "each worker and each rank gets blocks of its own"
_LOCAL = "local shards are read where they lie"
_ENDLESS = "each epoch has each sample once; .repeat() goes on for ever, .with_epoch(n) sets another length"
_INSTEAD = {
    "handler": "a damaged shard is an error; .map(f, handler=...) and .decode(handler=...) skip samples",
    "mode": _ENDLESS,
    "resampled": _ENDLESS,
    "repeat": "call .repeat()",
    "shardshuffle": _ORDERED,
    "detshuffle": _ORDERED,
    "cache_size": _LOCAL,
    "cache_dir": _LOCAL,
    "url_to_name": _LOCAL,
    "nodesplitter": _SPLIT,
    "workersplitter": _SPLIT,
    "select_files": 'fields="jpg;cls" reads these alone',
    "rename_files": "call .rename(...) or .rename_keys(...)",
    "empty_check": "a set without samples is an error, and a worker without any is none",
    "verbose": "the logger 'pipeline' tells what there is to tell",
}


class WebDataset(wds.DataPipeline, wds.compat.FluidInterface):  # type: ignore[misc]  # webdataset has no types
    """Iterate over raw samples {"__key__", "__url__", "jpg": bytes, ...}, with webdataset's methods for what comes behind.

    `urls`: a manifest, a folder, a tar, a brace pattern, a glob, or a list of those. `block`: consecutive samples that one worker
    gets; a loader's `.batched(block)` gives the same batches for any number of workers. `fields`: those that are read, such as
    "jpg;cls" (None: all); a sample that lacks one is an error. `split`, `lanes` and `window_bytes` as in `LoaderOptions`.

    Each iteration is the next epoch, in workers too, in another order: a function of (seed, epoch). Several ranks share an epoch;
    the samples that don't fill a block on each of them are left out. Raises OptionsError for arguments that can't be used,
    webdataset's other keywords by name; SourceError for shards that aren't there.
    """

    pipeline: list[Any]

    def __init__(
        self,
        urls: Any,
        *,
        block: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        split: str | None = None,
        fields: str | Sequence[str] | None = None,
        lanes: int = 8,
        window_bytes: int = 32 * 2**20,
        **others: Any,
    ) -> None:
        _refuse(others)
        check_int("block", block, 1)
        check_int("seed", seed, 0, _SEED_LIMIT)
        check_int("lanes", lanes, 1, MAX_LANES)
        if not isinstance(shuffle, bool):
            raise OptionsError(f"shuffle={shuffle!r}: True or False; behind it, .shuffle(n) mixes within n samples")
        named = urls.split("::") if isinstance(urls, str) else urls  # as webdataset joins several
        settings = ArrivalSettings(seed=seed, lanes=lanes, window_bytes=window_bytes, shuffle=shuffle)
        found = resolve(named, split=split)
        refuse_remote(found, "WebDataset")
        known = survey(found)
        super().__init__(Blocks(known, settings, block=block, fields=field_names(fields)))
        self.size: int | None = None
        self._closed = False

    @property
    def _source(self) -> Blocks:
        if self._closed:
            raise PipelineError("this WebDataset is closed; make another one")
        source: Blocks = self.stage(0)
        return source

    def __iter__(self) -> Iterator[Any]:
        self._source.begin()
        # Not through a generator: the epoch begins here, on all workers alike, not where the first sample is asked for.
        return iter(self.iterator1() if self.repetitions == 1 else super().__iter__())

    def close(self) -> None:
        """Close the shards that are open, and end iterations that go on; a second call does nothing."""
        if not self._closed:
            super().close()
        self._closed, self.pipeline = True, []

    def __len__(self) -> int:
        """Return what `with_length` was told, else the samples of an epoch on this rank where no stage follows.

        Raises UncountedError, a TypeError, where it isn't known.
        """
        if self.size is not None:
            return self.size
        source = self._source
        if len(self.pipeline) > 1 or self.repetitions != 1:
            raise UncountedError(
                "the length behind stages isn't known, as they may drop or join samples; tell it by .with_length(n)"
            )
        return len(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` (0 or more) the one that the next iteration reads; each later one reads the next."""
        check_int("epoch", epoch, 0, _EPOCH_LIMIT)
        self._source.set_epoch(epoch)

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Make `len` return `n`; what is read stays the same."""
        check_int("n", n, 0)
        self.size = n
        return self

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Make an epoch `nsamples` samples of this rank, over all its workers; each goes on where the one before ended."""
        if nbatches != -1 or len(self.pipeline) > 1:
            raise OptionsError(
                "with_epoch counts the samples of all workers together: call it right behind WebDataset(...), with samples"
            )
        check_int("nsamples", nsamples, 1)
        self.pipeline = [self._source.of_length(nsamples)]
        return self

    def shuffle(self, size: int, **options: Any) -> Self:
        """Mix samples within `size` of them; draws follow from seed, epoch and worker, unless `rng` or `seed` is given."""
        stage = _Buffer(self._source, size, options) if not options.keys() & {"rng", "seed"} else filters.shuffle(size, **options)
        return self if size < 1 else self.compose(stage)

    def decode(
        self,
        *handlers: Any,
        pre: Sequence[Callable[..., Any]] | None = None,
        post: Sequence[Callable[..., Any]] | None = None,
        only: Any = None,
        partial: bool = False,
        handler: Callable[[Exception], bool] = filters.reraise_exception,
    ) -> Self:
        """Decode fields by their names as webdataset does, but never unpickle; a DecodeError names shard, key, field and cause."""
        made = [autodecode.ImageHandler(h) if isinstance(h, str) else h for h in handlers]
        before = _guarded(autodecode.default_pre_handlers if pre is None else pre)
        after = _guarded(autodecode.default_post_handlers if post is None else post)
        decoder = _Decoder(_guarded(made), pre=before, post=after, only=only, partial=partial)
        result: Self = self.map(decoder, handler=handler)
        return result

    def xdecode(self, *decoders: Any, **options: Any) -> Self:
        """Decode fields by patterns, as webdataset does, but never unpickle."""
        given = options.pop("defaults", filters.default_decoders)
        safe = [(pattern, decoder) for pattern, decoder in given if decoder is not filters.decode_pickle]
        refused = [(f"*.{field}", functools.partial(_refuse_pickle, f".{field}")) for field in _PICKLES]
        result: Self = self.compose(filters.xdecode(*decoders, defaults=[*refused, *safe], **options))
        return result


def _refuse(others: Iterable[str]) -> None:
    """Raise OptionsError for keywords that `WebDataset` doesn't have."""
    known = ("block", "shuffle", "seed", "split", "fields", "lanes", "window_bytes")
    for name in others:
        if name in _INSTEAD:
            raise OptionsError(f"pipeline.WebDataset has no {name!r} as wds.WebDataset has: {_INSTEAD[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise OptionsError(f"pipeline.WebDataset has no {name!r}{hint}; it has {', '.join(known)}")


class _Buffer:
    """webdataset's shuffle buffer, with draws of its own for each epoch and worker."""

    def __init__(self, source: Blocks, size: int, options: dict[str, Any]) -> None:
        self._source, self._size, self._options = source, size, options

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        part, seed = self._source.part, self._source.settings.seed
        assert part is not None  # the source is called first
        rng = random.Random(fold(_BUFFER, seed, part.epoch, part.world.rank, part.worker))
        mixed: Iterator[Any] = filters.shuffle(self._size, rng=rng, **self._options)(samples)
        return mixed


class _Decoder(autodecode.Decoder):  # type: ignore[misc]  # webdataset has no types
    """webdataset's decoder, whose errors say nothing."""

    def decode(self, sample: Sample) -> Sample:
        try:
            decoded: Sample = super().decode(sample)
        except autodecode.DecodingError as error:
            cause = error.__cause__
            why = str(cause) if isinstance(cause, DecodeError) else f"{type(cause).__name__}: {cause}"
            raise DecodeError(f"{error.url}: sample {error.key!r}, {error.k}: {why}") from cause
        return decoded


def _guarded(handlers: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return decoding functions with a refusal before the one of webdataset's that unpickles."""
    return [g for handler in handlers for g in ((_refuse_pickle, handler) if handler is autodecode.basichandlers else (handler,))]


def _refuse_pickle(key: str, _data: Any) -> None:
    """Raise DecodeError for a field that webdataset would unpickle: whoever wrote the shard could run anything here."""
    if key.rpartition(".")[2].lower() in _PICKLES:
        raise DecodeError(
            "pickles in shards are never loaded, as they can run any code; give .decode(f) a function f(key, data) of your own "
            "for this field, .decode(only=...) the others, or pack the data as json or npy"
        )
