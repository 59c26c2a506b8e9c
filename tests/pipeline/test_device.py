"""Batches are finished on their device, in their dtype, and memory is used again only when nobody holds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standin import StandInStreams

from pipeline.device import Finisher, _Pool
from pipeline.errors import TransformError
from pipeline.items import Batch, KeyedBatch, Normalization, Slot

CPU = torch.device("cpu")
NORMAL = Normalization(np.array([0.1, 0.2, 0.3], np.float32), np.array([-1, 0, 1], np.float32))


@pytest.mark.parametrize("shape", [(3, 5, 7, 3), (1, 1, 1, 3), (2, 700, 900, 3), (2, 3, 100_000, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tiles_cover_every_pixel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Normalizing by tiles equals the formula on the whole batch, whatever the size."""
    images = torch.randint(0, 256, shape).to(dtype)
    out = Finisher(CPU, NORMAL, "float32")(Batch(images, np.arange(shape[0])))
    expected = images.float() * torch.from_numpy(NORMAL.scale) + torch.from_numpy(NORMAL.bias)
    torch.testing.assert_close(out.images.permute(0, 2, 3, 1), expected, atol=1e-5, rtol=0)
    assert out.labels.dtype == torch.int64


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_other_channels(channels: int) -> None:
    """Without a Normalize any number of channels is scaled to [0, 1]; with one, three are needed."""
    images = torch.full((2, 4, 4, channels), 255, dtype=torch.uint8)
    assert Finisher(CPU, None, "float32")(Batch(images, None)).images.unique().tolist() == [1.0]
    with pytest.raises(TransformError, match=str(channels)):
        Finisher(CPU, NORMAL, "float32")(Batch(images, None))
    one = Normalization(np.array([0.5], np.float32), np.array([2], np.float32))
    assert Finisher(CPU, one, "float32")(Batch(images, None)).images.unique().tolist() == [129.5]


def test_floats_stay_as_they_are() -> None:
    """What a transform gave as float32 isn't scaled."""
    images = torch.rand(2, 4, 4, 3) * 9
    assert torch.equal(Finisher(CPU, None, "float32")(Batch(images, None)).images.permute(0, 2, 3, 1), images)


HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of 16-bit floats are equal to the bit; one NaN is as good as another."""
    same = one.contiguous().view(torch.int16) == other.contiguous().view(torch.int16)
    return one.dtype == other.dtype and bool((same | (one.isnan() & other.isnan())).all())


def drawn(shape: Sequence[int], kind: torch.dtype, seed: int) -> torch.Tensor:
    """Return bytes, or floats of all magnitudes, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if kind == torch.uint8:
        return torch.randint(0, 256, tuple(shape), generator=generator, dtype=torch.uint8)
    bits = torch.randint(-(2**31), 2**31, tuple(shape), generator=generator, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


@HALVES
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.one_of(st.integers(1, 40), st.integers(5000, 12_000)), st.just(3)),
    st.sampled_from([torch.uint8, torch.float32]),
    st.sampled_from([NORMAL, Normalization(np.array([0.5], np.float32), np.array([-3], np.float32)), None]),
    st.integers(0, 2**32),
)
def test_sixteen_bits_are_the_float32_values_rounded(
    dtype: str, shape: Sequence[int], kind: torch.dtype, normalization: Normalization | None, seed: int
) -> None:
    """Bytes and floats of a transform, normalized or not, come as their float32 values do, rounded to the dtype: equal bits."""
    images = drawn(shape, kind, seed)
    expected = Finisher(CPU, normalization, "float32")(Batch(images, None)).images.to(getattr(torch, dtype))
    got = Finisher(CPU, normalization, dtype)(Batch(images, None)).images
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert equal_bits(got, expected)


@HALVES
def test_every_byte_of_every_channel(dtype: str) -> None:
    """All 256 values of each channel are the float32 ones rounded, one batch after the other, in sizes that differ."""
    finish, plain = Finisher(CPU, NORMAL, dtype), Finisher(CPU, NORMAL, "float32")
    for width in (256, 1, 300, 256):
        images = (torch.arange(2 * 130 * width) % 256).to(torch.uint8).view(2, 130, width, 1).repeat(1, 1, 1, 3)
        assert equal_bits(finish(Batch(images, None)).images, plain(Batch(images, None)).images.to(getattr(torch, dtype)))


@HALVES
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_sixteen_bits_are_written_into_memory_that_is_used_again(dtype: str, kind: torch.dtype) -> None:
    """A batch that is dropped leaves its memory to a later one, a batch that is held keeps it."""
    finish, images = Finisher(CPU, None, dtype), torch.ones(2, 8, 8, 3).to(kind)
    held = finish(Batch(images, None)).images
    places = {finish(Batch(images * 0, None)).images.data_ptr() for _ in range(5)}
    assert len(places) == 1
    assert held.data_ptr() not in places
    assert held.unique().tolist() == [torch.tensor(1 / 255 if kind == torch.uint8 else 1).to(held.dtype).item()]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("normalization", [NORMAL, None])
def test_streams_give_what_the_cpu_gives(dtype: str, kind: torch.dtype, normalization: Normalization | None) -> None:
    """Uploaded through pinned memory and finished by one operation there, batches have the same bits, labels and keys."""
    if dtype == "uint8" and kind != torch.uint8:
        return
    streams = StandInStreams(at_once=True)
    plain, finish = Finisher(CPU, normalization, dtype), Finisher(CPU, normalization, dtype, lambda _device: streams)
    assert (finish.overlaps, plain.overlaps) == (True, False)
    for seed, count in enumerate((3, 3, 2, 5)):
        batch = KeyedBatch(drawn((count, 9, 7, 3), kind, seed), np.arange(count), [str(at) for at in range(count)])
        expected, got = plain(batch), finish(batch)
        assert got.images.dtype == expected.images.dtype
        assert got.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got.images.nan_to_num(7), expected.images.nan_to_num(7))
        assert torch.equal(got.labels, expected.labels)
        assert got.keys == batch.keys


def test_streams_with_other_channels_from_batch_to_batch() -> None:
    """Scale and bias, which stay on the device, are those of each batch's channels."""
    finish = Finisher(CPU, None, "float32", lambda _device: StandInStreams(at_once=True))
    for channels in (3, 1, 4, 3):
        images = torch.full((2, 4, 4, channels), 255, dtype=torch.uint8)
        assert torch.equal(finish(Batch(images, None)).images, torch.ones(2, channels, 4, 4))


def test_streams_with_bytes_and_without_labels() -> None:
    """Files' bytes stay as they are beside labels that are uploaded; without labels there are none."""
    streams = StandInStreams()
    finish = Finisher(CPU, None, "float32", lambda _device: streams)
    files = [b"a", b"bc"]
    images, labels = finish(Batch(files, np.array([3, 4])))
    assert images is files
    assert labels.tolist() == [3, 4]
    assert finish(Batch(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), None)).labels is None


def test_streams_are_made_with_the_first_batch() -> None:
    """A loader may be made before the process has chosen its device, and before it forks."""
    made: list[torch.device] = []

    def make(device: torch.device) -> StandInStreams:
        made.append(device)
        return StandInStreams()

    finish = Finisher(CPU, None, "uint8", make)
    assert made == []
    for _ in range(3):
        finish(Batch(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), None))
    assert made == [CPU]


def test_a_slot_is_free_once_its_batch_was_begun() -> None:
    """Batches that were begun don't change with what a worker writes into their slots afterwards, on the CPU or on streams."""
    for streams in (None, StandInStreams()):
        finish = Finisher(CPU, None, "uint8", None if streams is None else lambda _device, there=streams: there)
        memory = torch.zeros(2 * 4 * 4 * 3, dtype=torch.uint8)
        begun = []
        for number in range(3):
            memory.fill_(number)
            begun.append(finish.begin(Batch(Slot(0, 0, (2, 4, 4, 3), torch.uint8, None if number else memory), np.full(2, number))))
        memory.fill_(99)
        assert [finish.hand_over(one).images.unique().tolist() for one in begun] == [[0], [1], [2]]


def test_bytes_that_a_transform_turned_into_floats_are_refused_on_streams_too() -> None:
    """dtype="uint8" with floats, or a Normalize for other channels, is a TransformError; the batches behind it come."""
    streams = StandInStreams(at_once=True)
    finish = Finisher(CPU, NORMAL, "uint8", lambda _device: streams)
    with pytest.raises(TransformError, match=r"A\.Normalize"):
        finish.begin(Batch(torch.zeros(1, 2, 2, 3), None))
    finish = Finisher(CPU, NORMAL, "float16", lambda _device: streams)
    with pytest.raises(TransformError, match="4"):
        finish.begin(Batch(torch.zeros(1, 2, 2, 4, dtype=torch.uint8), None))
    assert finish(Batch(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), None)).images[0, :, 0, 0].tolist() == [-1, 0, 1]


def test_pool_never_gives_out_held_memory() -> None:
    """A view, a permutation or a numpy array over a tensor holds its memory; a dropped one is given out again."""
    pool = _Pool()
    first = pool.take((4, 4), torch.float32)
    place = first.data_ptr()
    holder: object = first[1:].permute(1, 0)
    del first
    assert pool.take((4, 4), torch.float32).data_ptr() != place
    holder = holder.numpy()  # type: ignore[attr-defined]
    assert all(pool.take((4, 4), torch.float32).data_ptr() != place for _ in range(3))
    del holder
    assert place in {tensor.data_ptr() for tensor in [pool.take((4, 4), torch.float32) for _ in range(4)]}


def test_pool_is_bounded() -> None:
    """A loop that keeps all its batches gets new memory each time, and the pool forgets the rest."""
    pool = _Pool()
    kept = [pool.take((8,), torch.float32).fill_(i) for i in range(50)]
    assert [int(t[0]) for t in kept] == list(range(50))
    assert len(pool._arrays) <= 4
