"""The programs that compete: which script runs each, in which environment, on which set, and what must be said beside its numbers."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = "limit"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of the benchmark.

    script: the name of its with_*.py.
    dataset: the set that it reads; programs may share one.
    environment: the folder below .venv-bench that it runs in; None: the project's own.
    variant: what its script is told beside.
    jobs: the jobs that it takes part in.
    remote: it reads over HTTP.
    warm_only: pictures are in memory, whatever the place.
    note: what a reader must know beside its numbers.
    """

    name: str
    script: str
    dataset: str
    environment: str | None = None
    variant: str = ""
    jobs: tuple[str, ...] = ("problem", "crop")
    remote: bool = False
    warm_only: bool = False
    note: str = ""


_OWN = "its own compiled operators, not albumentations'"
_KEPT = "workers stay and keep their memory (mallopt)"

PROGRAMS = {
    program.name: program
    for program in (
        Program(name=LIMIT, script="limit", dataset="files", warm_only=True, note="pictures in memory, nothing handed over"),
        Program(name="ours", script="ours", dataset="shards", remote=True),
        Program(name="ours-auto", script="ours", dataset="shards", variant="auto", jobs=("crop",), note='decode="auto"'),
        Program(name="question", script="question", dataset="files", note="as written"),
        Program(name="question-best", script="question", dataset="files", variant="best", note=_KEPT),
        Program(name="webdataset", script="webdataset", dataset="webdataset", environment="webdataset", remote=True),
        Program(name="grain", script="grain", dataset="grain", environment="grain", note="threads of one process"),
        Program(
            name="spdl",
            script="spdl",
            dataset="webdataset",
            environment="spdl",
            note="decodes and resizes with FFmpeg, the rest is albumentations'; threads of one subprocess",
        ),
        Program(name="litdata", script="litdata", dataset="litdata", environment="litdata"),
        Program(name="streaming", script="streaming", dataset="streaming", environment="streaming", remote=True),
        Program(name="datasets", script="datasets", dataset="webdataset", environment="datasets", remote=True),
        Program(name="energon", script="energon", dataset="energon", environment="energon"),
        Program(name="dali", script="dali", dataset="dali", environment="dali", note=f"on the CPU; {_OWN}"),
        Program(name="squashfs", script="question", dataset="squashfs", variant="squashfs", note=_KEPT),
        Program(
            name="ram", script="question", dataset="files", variant="ram", note=f"{_KEPT}; the first epoch has the copying in it"
        ),
        Program(
            name="ffcv",
            script="ffcv",
            dataset="ffcv",
            environment="ffcv",
            note=f"{_OWN}; JPEGs encoded anew; no Rotate and no ChannelDropout, so less work in this job",
        ),
        Program(name="ray", script="ray", dataset="webdataset", environment="ray"),
    )
}

# Who writes each set.
WRITERS = {
    "files": PROGRAMS["question"],
    "shards": PROGRAMS["ours"],
    **{name: PROGRAMS[name] for name in ("squashfs", "webdataset", "grain", "litdata", "streaming", "energon", "dali", "ffcv")},
}

ENVIRONMENTS = tuple(dict.fromkeys(program.environment for program in PROGRAMS.values() if program.environment))
