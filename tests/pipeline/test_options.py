"""LoaderOptions is frozen, keyword-only and checked at birth."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import Any

import pytest

from pipeline import LoaderOptions, OptionsError


class OfBytes:
    """A path that is bytes."""

    def __fspath__(self) -> bytes:
        return b"/cache"


def test_defaults_are_valid_and_frozen() -> None:
    """The defaults need no argument, can't be changed, and survive a pickle (workers may be spawned)."""
    options = LoaderOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.keys = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options
    assert dataclasses.replace(options, keys=True).keys


def test_positional_arguments_are_refused() -> None:
    """Options are given by name only."""
    with pytest.raises(TypeError):
        LoaderOptions("train")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"key": True}, ["'key'", "did you mean 'keys'"]),
        ({"windows_bytes": 1}, ["did you mean 'window_bytes'"]),
        ({"num_workers": 3}, ["argument of make_loader"]),
        ({"drop_last": True}, ["last_batch"]),
        ({"decode": "fast"}, ["decode='fast'", "'full', 'auto', 'none'"]),
        ({"dtype": "float23"}, ["dtype='float23'", "did you mean 'float32'"]),
        ({"last_batch": True}, ["last_batch=True", "'drop'"]),
        ({"keys": 1}, ["keys=1"]),
        ({"persistent_workers": "yes"}, ["persistent_workers='yes'"]),
        ({"lanes": 0}, ["lanes=0", "1 to 64"]),
        ({"lanes": 65}, ["lanes=65"]),
        ({"window_bytes": 0}, ["window_bytes=0"]),
        ({"window_bytes": 1.5}, ["window_bytes=1.5"]),
        ({"prefetch_factor": 0}, ["prefetch_factor=0"]),
        ({"timeout": -1}, ["timeout=-1"]),
        ({"ahead": 2}, ["ahead=2", "0 to 1"]),
        ({"rank": 1}, ["rank=1, world_size=None", "both"]),
        ({"world_size": 2}, ["rank=None, world_size=2", "both"]),
        ({"rank": 2, "world_size": 2}, ["rank=2", "0 to 1"]),
        ({"rank": 0, "world_size": 0}, ["world_size=0"]),
        ({"prefetch": 1}, ["prefetch=1"]),
        ({"keep_bytes": -1}, ["keep_bytes=-1"]),
        ({"timeout": float("nan")}, ["timeout=nan"]),
        ({"multiprocessing_context": "thread"}, ["multiprocessing_context='thread'", "'forkserver'"]),
        ({"split": ""}, ["split=''"]),
        ({"image": ""}, ["image=''"]),
        ({"image": "jpg;;png"}, ["image='jpg;;png'"]),
        ({"label": "json:"}, ["label='json:'"]),
        ({"label": "txt:x"}, ["label='txt:x'"]),
        ({"classes": "abc"}, ["classes='abc'"]),
        ({"classes": [1, 2]}, ["classes=[1, 2]"]),
        ({"classes": {"b": 0, "a": 1}}, ["classes={'b': 0, 'a': 1}"]),
        ({"classes": {"a"}}, ["classes={'a'}"]),
        ({"classes": 5}, ["classes=5"]),
        ({"timeout": 1e19}, ["timeout=1e+19"]),
        ({"prefetch_factor": 10**19}, ["prefetch_factor=1000"]),
        ({"cache_dir": "a\0b"}, ["cache_dir=", "no path can hold"]),
        ({"cache_dir": "\ud800"}, ["cache_dir=", "no path can hold"]),
        ({"cache_dir": os.DirEntry}, ["cache_dir=", "a folder, or None"]),
        ({"cache_dir": OfBytes()}, ["cache_dir=", "a folder, or None"]),
        ({"cache_bytes": 2**61}, ["cache_bytes="]),
        ({"window_bytes": 2**200}, ["window_bytes="]),
        ({"dtype": "bfloat"}, ["dtype='bfloat'", "did you mean 'bfloat16'"]),
        ({"dtype": "half"}, ["dtype='half'", "'float32', 'float16', 'bfloat16', 'uint8'"]),
        ({"decode": "none", "dtype": "uint8"}, ["dtype='uint8'", "decode='none'"]),
        ({"decode": "none", "dtype": "float16"}, ["dtype='float16'", "decode='none'"]),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], parts: list[str]) -> None:
    """A wrong option says its name, what was given and what is allowed; a misspelled one the nearest."""
    with pytest.raises(OptionsError) as caught:
        LoaderOptions(**given)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
