"""Batches are finished on their device, and memory is used again only when nobody holds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.device import Finisher, _Pool
from pipeline.errors import TransformError
from pipeline.items import Batch, Normalization

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
