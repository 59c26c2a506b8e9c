"""Hands tokens to worker processes through torch's DataLoader, and takes their batches back in order."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from pipeline.arrival import OpenSteps
from pipeline.epoch import Steps, Token
from pipeline.errors import OptionsError, WorkerError
from pipeline.lifeline import share_temporary_folder
from pipeline.options import LoaderOptions
from pipeline.worker import Batches, start_worker


class Tokens:
    """The sampler: the tokens of one run, set anew before each."""

    def __init__(self) -> None:
        self.run = 0
        self._epoch = 0
        self._steps: Steps | OpenSteps | None = None

    def begin(self, epoch: int, steps: Steps | OpenSteps) -> None:
        """Make the next iteration another run, over `steps` of an epoch."""
        self.run += 1
        self._epoch, self._steps = epoch, steps

    def __iter__(self) -> Iterator[Token]:
        steps, run, epoch = self._steps, self.run, self._epoch
        return iter(()) if steps is None else (steps.token(step, run=run, epoch=epoch) for step in steps)


class _Workers(DataLoader[Any]):
    """A DataLoader that doesn't warn of more workers than cores: `make_loader` logs a line instead."""

    def check_worker_number_rationality(self) -> None:
        """Say nothing."""


def _identity(batch: Any) -> Any:
    return batch


def start_loader(dataset: Batches, tokens: Tokens, workers: int, options: LoaderOptions) -> DataLoader[Any]:
    """Return the DataLoader that hands tokens to workers; it draws from a generator of its own, so the trainer's stays as it is."""
    several: dict[str, Any] = {}
    if workers:
        share_temporary_folder()
        several = {
            "prefetch_factor": options.prefetch_factor,
            "persistent_workers": options.persistent_workers,
            "multiprocessing_context": options.multiprocessing_context,
            "timeout": options.timeout,
        }
    return _Workers(
        dataset,
        batch_size=None,
        sampler=tokens,
        num_workers=workers,
        collate_fn=_identity,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
        **several,
    )


def lies_ready(batches: object) -> bool:
    """Tell whether a batch came from the workers that nobody took yet: then the next one is there, or all but there.

    Never without workers, and never at an epoch's end: there is nothing to take.
    """
    awaited = getattr(batches, "_task_info", {}).get(getattr(batches, "_rcvd_idx", None))
    queue = getattr(batches, "_data_queue", None)
    return awaited is not None and queue is not None and (len(awaited) == 2 or not queue.empty())


def lost_workers(loader: DataLoader[Any]) -> list[str]:
    """Return which workers that a DataLoader keeps from epoch to epoch aren't there any more: their numbers, and how they ended."""
    workers = getattr(getattr(loader, "_iterator", None), "_workers", [])
    return [f"{number} (exit code {worker.exitcode})" for number, worker in enumerate(workers) if not worker.is_alive()]


def stop_loader(loader: DataLoader[Any]) -> object:
    """Stop the workers that a DataLoader keeps from epoch to epoch, and return its iterator over their batches."""
    kept = getattr(loader, "_iterator", None)
    stop_workers(kept)
    return kept


def stop_workers(batches: object) -> None:
    """Stop the workers behind an iterator of a DataLoader now, rather than when it is collected.

    An exception's traceback may hold it for long, and workers that are forked meanwhile would complain of it.
    """
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()


def worker_error(error: BaseException, batches: object, where: str) -> WorkerError | None:
    """Return what tells of a dead or hanging worker, with its number and the next step; None where `error` is of another kind."""
    workers = getattr(batches, "_workers", [])
    text = " ".join(str(error).split())
    if isinstance(error, EOFError | ConnectionError | FileNotFoundError):
        # A worker died, and the memory of a batch that it sent before can't be asked of it any more.
        text = _dead_workers(workers)
    if not text.startswith(("DataLoader worker", "DataLoader timed out")):
        return None
    numbers = {worker.pid: number for number, worker in enumerate(workers)}
    named = ", ".join(re.findall(r"\(pid(?:\(s\))? ([\d, ]+)\)", text))
    for pid in re.findall(r"\d+", named):
        if int(pid) in numbers:
            where += f", worker {numbers[int(pid)]}"
    return WorkerError(f"{where}: {text}; {_cure(text, workers)}")


def _cure(text: str, workers: Sequence[BaseProcess]) -> str:
    """Return what to do about a worker that died or hangs."""
    if "timed out" in text:
        return "raise LoaderOptions(timeout=...), or look what the transform waits for"
    if any((worker.exitcode or 0) > 0 for worker in workers):
        return (
            "it ended by itself, and stderr says why; workers that aren't forked import the program, which must start loaders "
            "behind `if __name__ == '__main__':` alone"
        )
    return "a killed worker is often out of memory or of /dev/shm: use fewer workers, a smaller prefetch_factor or batch_size"


def _dead_workers(workers: Sequence[BaseProcess]) -> str:
    """Return which workers have ended, in torch's words; "" where none has."""
    deadline = time.monotonic() + 1.0  # how one ended is known a moment later than that it did
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    dead = [f"(pid {w.pid}) ended with exit code {w.exitcode}" for w in workers if not w.is_alive()]
    return f"DataLoader worker {', '.join(dead)}" if dead else ""


def check_pickles(prepared: object, options: LoaderOptions) -> None:
    """Raise OptionsError for a transform that can't be sent to workers which don't start by fork."""
    method = options.multiprocessing_context or multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) == "fork":
        return
    try:
        pickle.dumps(prepared)
    except Exception as error:
        raise OptionsError(
            f"workers that don't start by fork get the transform pickled, and this one can't be ({error}); make it a function of a "
            "module or an albumentations transform, or set LoaderOptions(multiprocessing_context='fork') or num_workers=0"
        ) from error
