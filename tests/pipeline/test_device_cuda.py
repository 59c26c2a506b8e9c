"""On a GPU: batches of every dtype, uploaded beside the trainer, which waits for them and for nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import albumentations as A
import numpy as np
import pytest
import torch
from packing import PackedSet

from pipeline import LoaderOptions, make_loader
from pipeline.device import Finisher
from pipeline.items import Batch, Normalization
from pipeline.pinned import CudaStreams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CPU = torch.device("cpu")
NORMAL = Normalization(np.array([0.1, 0.2, 0.3], np.float32), np.array([-1, 0, 1], np.float32))
LONG = 1 << 30  # cycles of a GPU: about half a second


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """The GPU, idle before and after."""
    torch.cuda.synchronize()
    yield torch.device("cuda")
    torch.cuda.synchronize()


def numbered(number: int, count: int = 16, side: int = 64) -> Batch:
    """Return a batch that tells its number by every pixel and label."""
    return Batch(torch.full((count, side, side, 3), number % 256, dtype=torch.uint8), np.full(count, number))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("normalization", [NORMAL, None])
def test_the_values_are_the_cpus(cuda: torch.device, dtype: str, kind: torch.dtype, normalization: Normalization | None) -> None:
    """Images equal the CPU's, in channels-last memory: float32 to 1e-5, the rest to the bit of the GPU's own float32 rounded."""
    if dtype == "uint8" and kind != torch.uint8:
        return
    finish, plain = Finisher(cuda, normalization, dtype), Finisher(cuda, normalization, "float32")
    here = Finisher(CPU, normalization, "float32" if dtype != "uint8" else "uint8")
    for count in (5, 5, 3, 9):
        images = torch.randint(0, 256, (count, 33, 17, 3), dtype=torch.uint8).to(kind)
        got, labels = finish(Batch(images, np.arange(count)))
        assert got.is_cuda
        assert labels.is_cuda
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == list(range(count))
        expected = here(Batch(images, None)).images
        if dtype in ("float16", "bfloat16"):
            assert torch.equal(got, plain(Batch(images, None)).images.to(getattr(torch, dtype)))
        else:
            torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=0)
        assert got.dtype == getattr(torch, dtype)


def test_pinned_memory_is_pinned_and_used_again(cuda: torch.device) -> None:
    """Twenty batches of one size go through two buffers."""
    taken = []

    class Counted(CudaStreams):
        def pin(self, size: int) -> torch.Tensor:
            taken.append(super().pin(size))
            return taken[-1]

    finish = Finisher(cuda, NORMAL, "float16", Counted)
    for number in range(20):
        finish(numbered(number))
    assert len(taken) == 2
    assert all(memory.is_pinned() for memory in taken)


def test_a_batch_is_begun_and_given_while_the_trainer_works(cuda: torch.device) -> None:
    """Neither waits for what the trainer has put on its stream: the host goes on, and the upload is done before that work is."""
    finish = Finisher(cuda, NORMAL, "float16")
    for number in range(4):  # buffers, scale and bias, memory of both streams
        finish(numbered(number))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    begun = finish.begin(numbered(7))
    assert begun.uploaded is not None
    begun.uploaded.ready.synchronize()
    images, labels = finish.hand_over(begun)
    assert not torch.cuda.current_stream().query(), "beginning, uploading or giving a batch waited for the trainer's work"
    assert images.float().mean().item() == pytest.approx(7 * 0.2, abs=0.01)
    assert labels.tolist() == [7] * 16


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
@pytest.mark.parametrize("own", [False, True])
def test_a_slow_trainer_reads_what_it_was_given(cuda: torch.device, dtype: str, own: bool) -> None:
    """Memory of batches that were dropped while the GPU has yet to read them isn't used again before; on any stream of the trainer.

    Nor is pinned memory overwritten before it was uploaded: batches are begun as fast as the host can.
    """
    finish = Finisher(cuda, None, dtype)
    stream = torch.cuda.Stream() if own else torch.cuda.current_stream()
    sums = []
    with torch.cuda.stream(stream):
        begun = finish.begin(numbered(0, side=256))
        for number in range(1, 60):
            images, labels = finish.hand_over(begun)
            begun = finish.begin(numbered(number, side=256))
            torch.cuda._sleep(LONG // 200)
            sums.append(torch.stack([images.float().amin(), images.float().amax(), labels.float().mean()]))
            del images, labels
    torch.cuda.synchronize()
    scale = 1 if dtype == "uint8" else 1 / 255
    for number, found in enumerate(sums):
        expected = torch.tensor([number * scale, number * scale, number])
        torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


def test_the_trainer_waits_for_the_upload(cuda: torch.device) -> None:
    """A batch that is given at once, while its upload is far from done, is read only when it is."""
    made: list[CudaStreams] = []

    def make(device: torch.device) -> CudaStreams:
        made.append(CudaStreams(device))
        return made[-1]

    finish = Finisher(cuda, None, "uint8", make)
    finish(numbered(0))
    for number in (1, 2, 3):
        with made[0].own():
            torch.cuda._sleep(LONG // 20)
        images, labels = finish(numbered(number))
        assert (images.unique().tolist(), labels.unique().tolist()) == ([number], [number])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_cpus_batches(small_set: PackedSet, cuda: torch.device, dtype: str, workers: int) -> None:
    """Epochs, keys, labels, states and, rounded, pictures are those of the CPU; a trainer that keeps all batches finds them whole."""
    transform = A.Compose([A.Resize(32, 32), A.Rotate(limit=15), A.Normalize()])
    options = LoaderOptions(dtype=dtype, keys=True, last_batch="uneven")  # type: ignore[arg-type]
    seen = []
    for device in (CPU, cuda):
        with make_loader(
            small_set.folder, batch_size=30, num_workers=workers, transform=transform, device=device, options=options
        ) as loader:
            seen.append([(batch, loader.state_dict()) for _ in range(2) for batch in loader])
            time.sleep(0.1)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "uint8": 0}[dtype]
    for (here, state), (there, other) in zip(*seen, strict=True):
        assert there.keys == here.keys
        assert other == state
        assert torch.equal(there.labels.cpu(), here.labels)
        assert there.images.is_cuda
        assert there.images.dtype == here.images.dtype
        torch.testing.assert_close(there.images.cpu(), here.images, atol=tolerance, rtol=0)


def test_files_bytes_beside_labels_on_the_gpu(small_set: PackedSet, cuda: torch.device) -> None:
    """decode="none" gives bytes, and labels on the device."""
    options = LoaderOptions(decode="none", keys=True)
    with make_loader(small_set.folder, batch_size=30, num_workers=2, device=cuda, options=options) as loader:
        for files, labels, keys in loader:
            assert files == [small_set.pictures[key] for key in keys]
            assert labels.is_cuda
            assert labels.tolist() == [small_set.labels[key] for key in keys]
