"""The programs that compete, and the sets that they read: which script runs each, where, and what must be said beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sides import BYTES

LIMIT, OURS = "limit", "ours"
PICTURES = ("problem", "crop")
ALL_JOBS = (*PICTURES, BYTES)
COLD = ("drive", "disk")
FIRST = (*COLD, "http")  # places that are about the first epoch
SMALL = 448  # pixels of the shorter side of the small sets' pictures: what a job of 400 needs

Work = Literal["same", "own", "less"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of the benchmark.

    script: the name of its with_*.py.
    dataset: the set that it reads; programs may share one.
    environment: the folder below .venv-bench that it runs in; None: the project's own.
    variant: what its script is told beside.
    jobs: the jobs that it takes part in.
    places: the places that it takes part in; None: all that hold files, and where it is `remote` the server too.
    remote: it reads over HTTP.
    in_memory: pictures are in memory, whatever the place.
    work: "same": the others' decoder and transform; "own": the same steps by operators of its own; "less": not all of the steps.
    threads: threads or workers that its documentation names, tried beside the numbers that all are tried with.
    own_malloc: how it keeps memory is its own affair; for the others the allocator is told from outside to keep what it has mapped.
    quick: it takes part in a quick run.
    note: what a reader must know beside its numbers.
    """

    name: str
    script: str
    dataset: str
    environment: str | None = None
    variant: str = ""
    jobs: tuple[str, ...] = PICTURES
    places: tuple[str, ...] | None = None
    remote: bool = False
    in_memory: bool = False
    work: Work = "same"
    threads: int | None = None
    own_malloc: bool = False
    quick: bool = True
    note: str = ""

    def takes_part(self, place: str, job: str) -> bool:
        """Tell whether it runs there."""
        return job in self.jobs and (place in self.places if self.places else place != "http" or self.remote)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A set: the program whose script writes it, and the shorter side that its pictures are shrunk to; `note` is on its writing."""

    writer: str
    short_side: int | None = None
    note: str = "one process"


_OWN = "its own compiled operators, not albumentations'"
_KEPT = "workers stay and keep their memory"
_SMALL = f"pictures shrunk to {SMALL} pixels when packed"

PROGRAMS = {
    program.name: program
    for program in (
        Program(
            name=LIMIT,
            script="limit",
            dataset="files",
            in_memory=True,
            own_malloc=True,
            note="pictures in memory, nothing handed over",
        ),
        Program(name=OURS, script="ours", dataset="shards", jobs=ALL_JOBS, remote=True, own_malloc=True),
        Program(
            name="ours-scaled",
            script="ours",
            dataset="shards",
            variant="scaled",
            jobs=("crop",),
            places=("warm",),
            own_malloc=True,
            quick=False,
            note='as ours, decode="auto"',
        ),
        Program(name="question", script="question", dataset="files", jobs=ALL_JOBS, own_malloc=True, note="as written"),
        Program(name="question-best", script="question", dataset="files", variant="best", jobs=ALL_JOBS, quick=False, note=_KEPT),
        Program(
            name="squashfs",
            script="question",
            dataset="squashfs",
            variant="squashfs",
            jobs=ALL_JOBS,
            quick=False,
            note=f"an answer; {_KEPT}",
        ),
        Program(
            name="ram",
            script="question",
            dataset="files",
            variant="ram",
            quick=False,
            note=f"an answer; {_KEPT}; copying is in its first epoch",
        ),
        Program(name="webdataset", script="webdataset", dataset="webdataset", environment="webdataset", jobs=ALL_JOBS, remote=True),
        Program(
            name="grain",
            script="grain",
            dataset="grain",
            environment="grain",
            jobs=ALL_JOBS,
            threads=16,
            note="threads of one process",
        ),
        Program(
            name="spdl",
            script="spdl",
            dataset="webdataset",
            environment="spdl",
            work="own",
            note="FFmpeg decodes and resizes, the rest is albumentations'; threads of one subprocess",
        ),
        Program(
            name="spdl-cv2",
            script="spdl",
            dataset="webdataset",
            environment="spdl",
            variant="cv2",
            note="spdl's threads with the others' decoder and transform",
        ),
        Program(name="litdata", script="litdata", dataset="litdata", environment="litdata"),
        Program(name="streaming", script="streaming", dataset="streaming", environment="streaming"),  # of http:// it reads nothing
        Program(name="datasets", script="datasets", dataset="webdataset", environment="datasets", remote=True),
        Program(name="energon", script="energon", dataset="energon", environment="energon"),
        Program(name="dali", script="dali", dataset="dali", environment="dali", work="own", note=f"on the CPU; {_OWN}"),
        Program(
            name="dali-read",
            script="dali",
            dataset="dali",
            environment="dali",
            variant="read",
            places=COLD,
            work="own",
            quick=False,
            note=f"on the CPU, without mapping its files; {_OWN}",
        ),
        Program(
            name="ffcv",
            script="ffcv",
            dataset="ffcv",
            environment="ffcv",
            work="less",
            note=f"{_OWN}; JPEGs encoded anew; job problem without Rotate and ChannelDropout",
        ),
        Program(
            name="ffcv-quasi",
            script="ffcv",
            dataset="ffcv",
            environment="ffcv",
            variant="quasi",
            places=COLD,
            work="less",
            quick=False,
            note="as ffcv, in its order for sets that don't fit into memory",
        ),
        Program(name="ray", script="ray", dataset="webdataset", environment="ray"),
        Program(
            name="ours-small", script="ours", dataset="shards-small", jobs=("problem",), own_malloc=True, quick=False, note=_SMALL
        ),
        Program(
            name="litdata-small",
            script="litdata",
            dataset="litdata-small",
            environment="litdata",
            jobs=("problem",),
            quick=False,
            note=_SMALL,
        ),
        Program(
            name="ffcv-small",
            script="ffcv",
            dataset="ffcv-small",
            environment="ffcv",
            jobs=("problem",),
            work="less",
            quick=False,
            note=f"{_SMALL}; as ffcv",
        ),
    )
}

_ALL_CORES = "a process or thread a core"

DATASETS = {
    "files": Dataset(writer="question", note="tar | tar"),
    "shards": Dataset(writer=OURS, note="one process, and fsync"),
    "squashfs": Dataset(writer="squashfs", note=_ALL_CORES),
    "webdataset": Dataset(writer="webdataset"),
    "grain": Dataset(writer="grain"),
    "litdata": Dataset(writer="litdata", note=_ALL_CORES),
    "streaming": Dataset(writer="streaming"),
    "energon": Dataset(writer="energon"),
    "dali": Dataset(writer="dali"),
    "ffcv": Dataset(writer="ffcv", note=f"{_ALL_CORES}, JPEGs encoded anew"),
    "shards-small": Dataset(writer=OURS, short_side=SMALL, note=f"{_ALL_CORES}, shrunk"),
    "litdata-small": Dataset(writer="litdata", short_side=SMALL, note=f"{_ALL_CORES}, shrunk"),
    "ffcv-small": Dataset(writer="ffcv", short_side=SMALL, note=f"{_ALL_CORES}, shrunk"),
}

ENVIRONMENTS = tuple(dict.fromkeys(program.environment for program in PROGRAMS.values() if program.environment))
