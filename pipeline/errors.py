"""What can go wrong while reading, as one tree of types that are rebuilt from one string.

    PipelineError
    ├── OptionsError (ValueError)    an argument that can't be used
    ├── SourceError                  what the user points at isn't there, or isn't usable
    │   ├── ShardError               a shard that is cut, changed or damaged
    │   ├── RemoteError              what lies at a URL can't be read
    │   │   ├── MissingError         there is nothing at it
    │   │   ├── DeniedError          its server refuses to give it to this user
    │   │   └── ChangedError         it is another version than the one whose bytes were read before
    │   └── UncountedError (TypeError)  shards whose samples nobody counted, where their number is needed
    ├── SampleError                  a sample that can't become part of a batch
    │   ├── DecodeError              its picture or label can't be decoded
    │   └── TransformError           the transform failed on it, or gave something unusable
    ├── SkippedError                 more samples were left out than may be
    └── WorkerError                  a worker process died or hangs

torch rebuilds a worker's exception in the trainer as `type(text)`: so each takes one string, and that string says everything:
the place (shard, offset, key), the cause and the next step.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Base of all errors that pipeline raises on purpose."""


class OptionsError(PipelineError, ValueError):
    """An argument that can't be used."""


class SourceError(PipelineError):
    """What the user points at isn't there, or isn't usable."""


class ShardError(SourceError):
    """A shard that is cut, changed or damaged."""


class RemoteError(SourceError):
    """What lies at a URL can't be read."""


class MissingError(RemoteError):
    """There is nothing at a URL."""


class DeniedError(RemoteError):
    """A server refuses to give what lies at a URL to this user."""


class ChangedError(RemoteError):
    """What lies at a URL is another version than the one whose bytes were read before."""


class UncountedError(SourceError, TypeError):
    """Shards whose samples nobody counted, where their number is needed; a TypeError, as `len` of what has no length is."""


class SampleError(PipelineError):
    """A sample that can't become part of a batch."""


class DecodeError(SampleError):
    """A sample's picture or label that can't be decoded."""


class TransformError(SampleError):
    """The transform failed on a sample, or gave something that no batch can hold."""


class SkippedError(PipelineError):
    """More samples can't become part of batches than may be skipped."""


class WorkerError(PipelineError):
    """A worker process died or hangs."""


def said(error: BaseException) -> str:
    """Return an error as a text that another process makes one of again: its type's name, and what it says."""
    return f"{type(error).__name__ if isinstance(error, PipelineError) else 'SourceError'}\n{error}"


def heard(text: str) -> PipelineError:
    """Return the error that `said` made a text of; a SourceError where the type isn't known."""
    name, _, message = text.partition("\n")
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, PipelineError) else SourceError(message or name)
