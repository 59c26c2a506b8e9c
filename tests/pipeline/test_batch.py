"""Samples are gathered into one batch, and a worker's slots are used in turn."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch import Slots, gather
from pipeline.items import Slot


def samples(count: int, side: int = 4) -> list[dict[str, object]]:
    return [
        {"__key__": f"k{i}", "__url__": "a.tar", "__place__": i, "image": np.full((side, side, 3), i, np.uint8), "label": i}
        for i in range(count)
    ]


def slots_of(count: int, worker: int = 0) -> Slots:
    """Return slots for a trainer that says nothing."""
    slots = Slots(worker=worker, count=count)
    slots.begin(0, 0, lambda: (-1, 0))
    return slots


def test_slots_are_used_in_turn_and_sent_once_a_run() -> None:
    """A slot comes again after `count` batches; its memory is sent with its first batch of a run, and anew in the next run."""
    slots = slots_of(2, worker=3)
    taken = [slots.take((2, 4), torch.uint8) for _ in range(5)]
    assert [slot.number for _, slot in taken] == [0, 1, 0, 1, 0]
    assert [slot.memory is not None for _, slot in taken] == [True, True, False, False, False]
    assert taken[0][0].data_ptr() == taken[2][0].data_ptr() != taken[1][0].data_ptr()
    slots.begin(1, 0, lambda: (-1, 0))
    assert slots.take((2, 4), torch.uint8)[1].memory is not None
    assert taken[0][1].worker == 3


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_no_slot_is_written_while_the_trainer_may_read_it(ahead: int, steps: list[tuple[bool, int]]) -> None:
    """However far the trainer is, and however late it says so: a batch that it didn't get lies in a slot of its own.

    Where it says so in time, no more slots are used than batches are waiting.
    """
    slots, said = Slots(worker=0, count=ahead + 1), 0
    waiting: list[tuple[int, int]] = []  # (position, slot), made and not yet got
    got = 0
    for number, (tells, gets) in enumerate(steps):
        for _ in range(max(gets, len(waiting) + 1 - ahead)):  # the trainer asks for the next batch once it is done with this one
            got = waiting.pop(0)[0] + 1 if waiting else got
        said = got * 64 if tells else said
        slots.begin(7, number * 64, lambda: (7, said))  # noqa: B023
        _, slot = slots.take((4,), torch.uint8)
        assert slot.number not in [taken for _, taken in waiting]
        waiting.append((number, slot.number))
        assert slot.number <= ahead
        assert said < got * 64 or slot.number < len(waiting)


def test_a_larger_batch_gets_new_memory_that_is_sent() -> None:
    """A batch that doesn't fit its slot gets a larger one, and a smaller one uses a part."""
    slots = slots_of(1)
    slots.take((4,), torch.uint8)
    tensor, slot = slots.take((4,), torch.float32)
    assert tensor.dtype == torch.float32
    assert slot.memory is not None
    assert len(slot.memory) == 16
    assert slots.take((2,), torch.uint8)[1].memory is None
    assert slot.memory.is_shared()


def test_gather_into_a_slot_and_without() -> None:
    """Pictures, labels and keys stand at their places, in whatever order they come; in a slot as in memory of the process."""
    (plain,) = gather(samples(3)[::-1], size=3, keys=True, pixels=True, slots=None)
    (sent,) = gather(samples(3), size=3, keys=True, pixels=True, slots=slots_of(1))
    assert isinstance(sent.images, Slot)
    assert sent.images.memory is not None
    assert torch.equal(sent.images.memory.view(3, 4, 4, 3), plain.images)
    assert plain.images[:, 0, 0, 0].tolist() == plain.labels.tolist() == [0, 1, 2]
    assert plain.keys == sent.keys == ["k0", "k1", "k2"]
