"""Batches are uploaded from pinned memory that is used again, and nobody reads or overwrites anything too early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standin import StandInStreams

from pipeline.pinned import Uploaded, Uploader


def unchanged(images: torch.Tensor) -> torch.Tensor:
    return images


def batch(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of `size` pictures and its labels, all of which tell its number."""
    return torch.full((size, 3, 5, 3), number % 128, dtype=torch.uint8), torch.full((size,), number)


def holds(uploaded: Uploaded, number: int, size: int) -> bool:
    """Tell whether a batch that was handed over is the one of that number."""
    assert uploaded.images is not None
    assert uploaded.labels is not None
    return all(torch.equal(*pair) for pair in zip((uploaded.images, uploaded.labels), batch(number, size), strict=True))


STEPS = st.lists(
    st.one_of(st.tuples(st.just("begin"), st.integers(1, 4)), st.tuples(st.sampled_from(["give", "work"]), st.just(1)))
)


@given(STEPS)
def test_whatever_the_device_has_done_by_when(steps: Sequence[tuple[str, int]]) -> None:
    """However late the device is, and however many batches are begun, each is whole when it is handed over, and stays so."""
    streams = StandInStreams()
    uploader = Uploader(streams)
    coming: list[tuple[Uploaded, int, int]] = []
    given_: list[tuple[Uploaded, int, int]] = []
    for number, (step, size) in enumerate(steps):
        if step == "begin":
            images, labels = batch(number, size)
            coming.append((uploader.begin(images, labels, unchanged), number, size))
            images.fill_(255)  # a worker writes its next batch there
            labels.fill_(-1)
        elif step == "work":
            streams.work_until(streams.done + 1)
        elif coming:
            given_.append(coming.pop(0))
            uploader.hand_over(given_[-1][0])
            assert holds(*given_[-1])
    streams.work_until(10_000)
    assert all(holds(*one) for one in given_)
    assert [id(one) for one in streams.followed] == [id(part) for one, _, _ in given_ for part in (one.images, one.labels)]


def test_two_buffers_are_used_in_turn() -> None:
    """Batches of one size need two buffers; the host waits for the device only where both are being uploaded."""
    streams = StandInStreams()
    uploader = Uploader(streams)
    for number in range(2):
        uploader.begin(*batch(number, 4), unchanged)
    assert (len(streams.pinned), streams.waits, streams.done) == (2, 0, 0)
    uploader.begin(*batch(2, 4), unchanged)
    assert (len(streams.pinned), streams.waits, streams.done) == (2, 1, 2)  # for the first batch, not for the second
    streams.work_until(6)
    for number in range(20):
        uploader.begin(*batch(number, 4 - number % 3), unchanged)
        streams.work_until(10_000)
    assert (len(streams.pinned), streams.waits) == (2, 1)


def test_a_buffer_grows() -> None:
    """A batch that doesn't fit its buffer gets a larger one; a smaller one uses a part."""
    streams = StandInStreams(at_once=True)
    uploader = Uploader(streams)
    for number, size in enumerate((1, 1, 7, 2, 1, 7)):
        uploaded = uploader.begin(*batch(number, size), unchanged)
        uploader.hand_over(uploaded)
        assert holds(uploaded, number, size)
    sizes = [len(memory) for memory in streams.pinned]
    assert len(sizes) == 5
    assert sizes[0] == sizes[1] < sizes[3] < sizes[2] == sizes[4]


def test_work_is_waited_for_by_the_trainer_not_by_the_buffer() -> None:
    """What is done with images on the device comes before the batch is handed over; a buffer is free once it was uploaded."""
    streams = StandInStreams()
    uploader = Uploader(streams)

    def doubled(images: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(images.shape)
        streams.put(lambda: out.copy_(images).mul_(2))
        return out

    uploads = [uploader.begin(*batch(number, 2), doubled) for number in range(3)]
    assert streams.done == 2  # of the first batch its two uploads, not the work behind
    for number, uploaded in enumerate(uploads):
        uploader.hand_over(uploaded)
        assert uploaded.images is not None
        assert uploaded.images.unique().tolist() == [2 * number]


def test_images_or_labels_alone() -> None:
    """A batch without labels, or of bytes that nobody decodes, has one tensor to upload."""
    streams = StandInStreams()
    uploader = Uploader(streams)
    images, labels = batch(5, 2)
    without, bare = uploader.begin(images, None, unchanged), uploader.begin(None, labels, unchanged)
    for uploaded in (without, bare):
        uploader.hand_over(uploaded)
    assert without.labels is None
    assert bare.images is None
    assert torch.equal(*(one for one in (without.images, images) if one is not None))
    assert torch.equal(*(one for one in (bare.labels, labels) if one is not None))
    assert len(streams.followed) == 2


@pytest.mark.parametrize("where", ["upload", "work"])
def test_a_failure_leaves_no_buffer_to_be_overwritten(where: str) -> None:
    """Where a batch fails in the middle (memory of the device), the part that is under way isn't written over."""
    streams = StandInStreams()
    uploader = Uploader(streams)
    first, _ = batch(1, 2)

    def fail(_images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    def second_fails() -> None:
        if streams.there and where == "upload":
            raise torch.OutOfMemoryError

    streams.before_upload = second_fails
    with pytest.raises(torch.OutOfMemoryError):
        uploader.begin(first, torch.zeros(2), fail)
    streams.before_upload = lambda: None
    for number in (2, 3):
        uploader.begin(*batch(number, 2), unchanged)
    assert streams.waits == 1
    assert torch.equal(streams.there[0], first)
