"""Samples are gathered into one batch, and a worker's slots are used in turn."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.batch import Slots, check_shared_memory, gather
from pipeline.errors import OptionsError
from pipeline.items import Slot


def samples(count: int, side: int = 4) -> list[dict[str, object]]:
    return [
        {"__key__": f"k{i}", "__url__": "a.tar", "__place__": i, "image": np.full((side, side, 3), i, np.uint8), "label": i}
        for i in range(count)
    ]


def test_slots_are_used_in_turn_and_sent_once_a_run() -> None:
    """A slot comes again after `count` batches; its memory is sent with its first batch of a run, and anew in the next run."""
    slots = Slots(worker=3, count=2)
    taken = [slots.take(0, (2, 4), torch.uint8) for _ in range(4)]
    assert [slot.number for _, slot in taken] == [0, 1, 0, 1]
    assert [slot.memory is not None for _, slot in taken] == [True, True, False, False]
    assert taken[0][0].data_ptr() == taken[2][0].data_ptr() != taken[1][0].data_ptr()
    assert slots.take(1, (2, 4), torch.uint8)[1].memory is not None
    assert taken[0][1].worker == 3


def test_a_larger_batch_gets_new_memory_that_is_sent() -> None:
    """A batch that doesn't fit its slot gets a larger one, and a smaller one uses a part."""
    slots = Slots(worker=0, count=1)
    slots.take(0, (4,), torch.uint8)
    tensor, slot = slots.take(0, (4,), torch.float32)
    assert tensor.dtype == torch.float32
    assert slot.memory is not None
    assert len(slot.memory) == 16
    assert slots.take(0, (2,), torch.uint8)[1].memory is None
    assert slot.memory.is_shared()


def test_gather_into_a_slot_and_without() -> None:
    """Pictures, labels and keys stand at their places, in whatever order they come; in a slot as in memory of the process."""
    (plain,) = gather(samples(3)[::-1], size=3, keys=True, pixels=True, slots=None, run=0)
    (sent,) = gather(samples(3), size=3, keys=True, pixels=True, slots=Slots(worker=0, count=1), run=0)
    assert isinstance(sent.images, Slot)
    assert sent.images.memory is not None
    assert torch.equal(sent.images.memory.view(3, 4, 4, 3), plain.images)
    assert plain.images[:, 0, 0, 0].tolist() == plain.labels.tolist() == [0, 1, 2]
    assert plain.keys == sent.keys == ["k0", "k1", "k2"]


@pytest.mark.case("P03")
def test_shared_memory_is_compared_with_what_is_needed(tmp_path: Path) -> None:
    """Three batches that fit a file system are fine; of ones that don't the error says all numbers and the ways out (P03)."""
    space = os.statvfs(tmp_path)
    check_shared_memory(space.f_bavail * space.f_frsize // 8, 3, str(tmp_path))
    with pytest.raises(OptionsError, match=r"3 batches of [\d.]+ MB each need \d+ MB.*--shm-size=.*num_workers=0"):
        check_shared_memory(space.f_blocks * space.f_frsize // 2, 3, str(tmp_path))
