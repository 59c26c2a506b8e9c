"""grain: ArrayRecord files, read at random by threads of one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import grain
from array_record.python.array_record_module import ArrayRecordWriter
from jobs import Picture
from protocol import Options, Plan, main, rows
from sides import BYTES

LABEL_BYTES = 8


def write(photos: Path, out: Path, plan: Plan) -> None:
    """Write records of a label and a picture; a group of one record is what random reading asks for."""
    pictures = rows(photos)
    shard_bytes = plan.bytes(pictures) + LABEL_BYTES * plan.samples(len(pictures))
    out.mkdir()
    writer, size, shards = None, 0, 0
    for path, label in pictures:
        record = label.to_bytes(LABEL_BYTES, "little") + path.read_bytes()
        if writer is None or size + len(record) > shard_bytes:
            if writer is not None:
                writer.close()
            writer, size, shards = ArrayRecordWriter(f"{out}/shard-{shards:06d}.array_record", "group_size:1"), 0, shards + 1
        writer.write(record)
        size += len(record)
    if writer is not None:
        writer.close()


def columns(samples: Sequence[tuple]) -> tuple:
    """Return pictures and labels of a batch as two lists."""
    return tuple(zip(*samples, strict=True))


def read(options: Options) -> Iterator[grain.IterDataset]:
    """Yield a dataset for each epoch, in an order of its own."""
    picture = bytes if options.job == BYTES else Picture(options.job)

    def parse(record: bytes) -> tuple:
        return picture(memoryview(record)[LABEL_BYTES:]), int.from_bytes(record[:LABEL_BYTES], "little")

    source = grain.sources.ArrayRecordDataSource(options.files(".array_record"))
    # Its default of 500 samples ahead would hold a GB of pictures.
    threads = grain.ReadOptions(num_threads=options.workers, prefetch_buffer_size=2 * options.batch)
    form = {"batch_fn": columns} if options.job == BYTES else {}
    for epoch in range(options.epochs):
        samples = grain.MapDataset.source(source).shuffle(seed=epoch).map(parse)
        yield samples.to_iter_dataset(threads).batch(options.batch, **form)


if __name__ == "__main__":
    main(write, read)
