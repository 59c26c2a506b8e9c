"""How a benchmark runs: who when, with how many workers, which sets are written anew, and what is left out without ending the rest."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parent.parent / "benchmarks" / "bench"
COUNT = 6

sys.path.append(str(BENCH))  # for `rounds`, which a law below needs before any fixture

import rounds  # noqa: E402

BYTES = b"\xff\xd8picture\xff\xd9"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's modules importable."""
    monkeypatch.syspath_prepend(BENCH)


def photos(folder: Path, count: int = COUNT) -> Path:
    """Make a set of loose files that are as small as possible."""
    keys = [f"{number * 7919 % 65536:04x}" for number in range(count)]
    for key in keys:
        path = folder / "train" / key[0] / key[1] / key[2] / f"{key}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BYTES)
    (folder / "train.csv").write_text("id,landmark_id\n" + "".join(f"{key},77\n" for key in keys))
    return folder


class Programs:
    """Stands for the processes of programs: writes their sets, and answers with epochs as fast as `rates` has it.

    rates: images a second by program's script and workers; absent: 100. fails: scripts that fail, by verb.
    """

    def __init__(self, rates: dict[tuple[str, int], float] | None = None, fails: Sequence[tuple[str, str]] = ()) -> None:
        self.rates, self.fails = rates or {}, list(fails)
        self.ran: list[tuple[str, str]] = []
        self.environments: dict[str, dict[str, str]] = {}

    def __call__(self, command: Sequence[Any], *, patience: float, watch: bool = False, environment: Any = None) -> Any:
        from launch import Outcome
        from processes import Memory

        words = [str(word) for word in command]
        name, verb = Path(words[1]).stem.removeprefix("with_"), words[2]
        self.ran.append((verb, name))
        if (verb, name) in self.fails:
            return Outcome(None, "exit code 1: no")
        if verb == "write":
            Path(words[4]).mkdir()
            (Path(words[4]) / "data").write_bytes(BYTES * COUNT)
            return Outcome({"seconds": 1.0, "bytes": 100, "files": 1, "versions": {}})
        self.environments[name] = dict(environment or {})
        workers, epochs = (int(words[words.index(option) + 1]) for option in ("--workers", "--epochs"))
        seconds = COUNT / self.rates.get((name, workers), 100.0)
        one = {"seconds": seconds, "arrivals": [seconds], "sizes": [COUNT], "missing": 0, "doubled": 0}
        return Outcome({"epochs": [one] * epochs, "versions": {name: "1"}}, None, Memory(1, 2, 3) if watch else None)


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a contest of stand-ins; return its results."""
    import contest as module
    import places
    import sets
    from records import Results

    monkeypatch.setattr(module, "absent", lambda program: None)
    monkeypatch.setattr(sets, "absent", lambda program: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(places, "DROP", tmp_path / "drop_caches")  # other tests' page cache isn't ours to drop

    def run(processes: Programs, **more: Any) -> Any:
        monkeypatch.setattr(module, "launch", processes)
        monkeypatch.setattr(sets, "launch", processes)
        source = tmp_path / "source"
        given = {
            "photos": source if source.exists() else photos(source),
            "count": COUNT,
            "programs": ("ours", "grain", "litdata", "energon"),
            "places": ("warm",),
            "jobs": ("problem",),
            "rounds": 2,
            "epochs": 2,
            "workers": None,
            "quick": False,
            "search": True,
            "writes": 1,
            "memory": True,
            "keep_memory": True,
            "work": tmp_path / "work",
            "home": tmp_path / "home",
            "server": sys.executable,
            "touch_gib": 0,
            "disk": None,
        }
        results = Results(machine={}, settings={})
        module.Contest(module.Settings(**(given | more)), results, save=lambda: None, say=lambda _: None).run()
        return results

    return run


@given(st.integers(0, 12), st.integers(0, 40))
def test_a_round_has_each_program_once(count: int, number: int) -> None:
    """The limit stands before every third program and at the end; each program begins a round in its turn."""
    programs = [f"p{n}" for n in range(count)]
    runs = rounds.order(programs, "limit", number)
    assert Counter(run for run in runs if run != "limit") == Counter(programs)
    assert runs[0] == runs[-1] == "limit"
    assert all("limit" in runs[at : at + 4] for at in range(len(runs) - 3))
    if programs:
        assert runs[1] == programs[number % count]
    assert rounds.order(programs, None, number) == [run for run in runs if run != "limit"]


@given(st.integers(1, 256))
def test_all_numbers_of_workers_divide_the_shards(cores: int) -> None:
    """No worker of those that are tried has more shards than another, and there are 16 at least."""
    for workers in rounds.tried(cores, None):
        assert rounds.shards(cores) % workers == 0 or (cores % 2 and workers == cores // 2)
    assert 16 <= rounds.shards(cores) <= max(16 + 2 * cores, 2 * cores)


@pytest.mark.parametrize(
    ("cores", "named", "tried"), [(2, None, [1, 2, 4]), (1, None, [1, 2]), (8, 16, [1, 4, 8, 16]), (2, 16, [1, 2, 4, 16])]
)
def test_what_is_tried_grows_with_the_cores(cores: int, named: int | None, tried: list[int]) -> None:
    """One worker, half the cores, all, twice as many, and what a library's authors name."""
    assert rounds.tried(cores, named) == tried


def test_each_program_has_its_best_workers(contest: Callable[..., Any]) -> None:
    """They are tried in each place; the limit has one a core, and a number that was asked for is taken."""
    programs = Programs({("ours", 4): 300.0, ("grain", 16): 200.0, ("litdata", 1): 150.0})
    found = contest(programs, places=("warm", "disk"))
    used = {(run.place, run.program): run.workers for run in found.runs}
    for place in ("warm", "disk"):
        assert [used[place, name] for name in ("limit", "ours", "grain", "litdata")] == [2, 4, 16, 1]
    assert {(trial.place, trial.program) for trial in found.trials} == {
        (place, name) for place in ("warm", "disk") for name in ("ours", "grain", "litdata", "energon")
    }
    asked = contest(programs, workers=3)
    assert {(run.program, run.workers) for run in asked.runs if run.round == 0} >= {("limit", 2), ("ours", 3), ("grain", 3)}


def test_a_program_that_fails_twice_is_not_tried_on(contest: Callable[..., Any]) -> None:
    """Its run in the first round has the reason; a number of workers with which it fails is none that it is run with."""
    programs = Programs(fails=[("read", "grain")])
    found = contest(programs)
    assert programs.ran.count(("read", "grain")) == 3
    assert [(run.round, run.error) for run in found.runs if run.program == "grain"] == [(0, "exit code 1: no")]


def test_without_a_search_nothing_is_tried(contest: Callable[..., Any]) -> None:
    """Each program has one worker a core, or what its authors name; a quick run has fewer of the limit."""
    found = contest(Programs(), search=False, quick=True, rounds=1, epochs=1, memory=False)
    assert not found.trials
    assert {run.program: run.workers for run in found.runs} == {"limit": 2, "ours": 2, "grain": 16, "litdata": 2, "energon": 2}
    assert [run.program for run in found.runs] == ["limit", "ours", "grain", "litdata", "energon", "limit"]


def test_rounds_are_interleaved_and_memory_comes_last(contest: Callable[..., Any]) -> None:
    """Each round begins with another program; the watched runs aren't timed."""
    found = contest(Programs(), workers=2)
    assert [(run.round, run.program) for run in found.runs] == [
        *[(0, name) for name in ("limit", "ours", "grain", "litdata", "limit", "energon", "limit")],
        *[(1, name) for name in ("limit", "grain", "litdata", "energon", "limit", "ours", "limit")],
        *[(None, name) for name in ("ours", "grain", "litdata", "energon")],
    ]
    assert [run.memory is None for run in found.runs] == [True] * 14 + [False] * 4


def test_a_program_that_fails_is_not_run_again(contest: Callable[..., Any]) -> None:
    """Its one run has the reason, the others go on."""
    found = contest(Programs(fails=[("read", "grain")]), workers=2)
    assert [run.error for run in found.runs if run.program == "grain"] == ["exit code 1: no"]
    assert Counter(run.program for run in found.runs)["litdata"] == 3


def test_a_set_that_cannot_be_written_is_tried_once(contest: Callable[..., Any]) -> None:
    """All that read it are left out with the reason."""
    programs = Programs(fails=[("write", "webdataset")])
    found = contest(programs, programs=("ours", "webdataset", "spdl", "ray"), workers=2)
    assert programs.ran.count(("write", "webdataset")) == 1
    assert found.absent == dict.fromkeys(("webdataset", "spdl", "ray"), "its set can't be written: exit code 1: no")
    assert {run.program for run in found.runs} == {"limit", "ours"}


def test_sets_are_kept_until_what_they_are_made_of_changes(contest: Callable[..., Any], tmp_path: Path) -> None:
    """Other pictures, and as many timings as are asked for, write them anew; nothing else does."""
    contest(Programs(), workers=2)
    again = Programs()
    contest(again, workers=2)
    assert not [run for run in again.ran if run[0] == "write"]
    timed = Programs()
    found = contest(timed, workers=2, writes=3)
    assert Counter(timed.ran)["write", "grain"] == 2
    assert found.sets["grain"].seconds == (1.0, 1.0, 1.0)
    source = tmp_path / "source"
    record = next((tmp_path / "work").rglob("grain.json"))
    for change in ("another picture", "another order", "a record of another version", "a cut record"):
        if change == "a record of another version":
            record.write_text(json.dumps(json.loads(record.read_text()) | {"seconds": 1.0}))
        elif change == "a cut record":
            record.write_bytes(record.read_bytes()[:20])
        elif change == "another picture":
            next(source.rglob("*.jpg")).write_bytes(BYTES + b"!")
        else:
            rows = (source / "train.csv").read_text().splitlines()
            (source / "train.csv").write_text("\n".join([rows[0], *reversed(rows[1:])]) + "\n")
        other = Programs()
        contest(other, workers=2)
        assert Counter(other.ran)["write", "grain"] == 1, change


def test_a_writer_that_changed_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a set has its script in it."""
    import sets
    from programs import PROGRAMS

    before = sets.sources(PROGRAMS["grain"])
    copy = tmp_path / "with_grain.py"
    for name in ("with_grain.py", "protocol.py", "jobs.py", "tars.py"):
        (tmp_path / name).write_bytes((BENCH / name).read_bytes())
    monkeypatch.setattr(sets, "script", lambda _: copy)
    assert sets.sources(PROGRAMS["grain"]) == before
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert sets.sources(PROGRAMS["grain"]) != before


def test_peers_are_told_to_keep_their_memory(contest: Callable[..., Any]) -> None:
    """What ours does for itself is done for peers from outside; the question is as written, unless nobody is told."""
    programs = Programs()
    contest(programs, programs=("ours", "question", "grain"), workers=2)
    told = {name: "MALLOC_TRIM_THRESHOLD_" in given for name, given in programs.environments.items()}
    assert told == {"limit": False, "ours": False, "question": False, "grain": True}
    plain = Programs()
    contest(plain, programs=("grain",), workers=2, keep_memory=False)
    assert plain.environments["grain"] == {}


def test_a_place_that_fails_does_not_end_the_others(contest: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks, or why it failed, is noted."""
    import contest as module

    lacks = {"http": "nginx isn't here: apt-get install nginx"}
    monkeypatch.setattr(module, "lacking", lambda place, server: lacks.get(place))

    def fail(*_: object) -> None:
        raise SystemExit("drive.py up: no loop device")

    monkeypatch.setattr(module.ColdDrive, "__enter__", fail)
    found = contest(Programs(), places=("drive", "http", "warm"), workers=2, memory=False)
    assert found.absent == {"place drive": "it failed: drive.py up: no loop device", "place http": lacks["http"]}
    assert {run.place for run in found.runs} == {"warm"}


def test_a_set_without_room_at_a_place_costs_one_program(contest: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when a set is copied there: the reason is the program's, nothing of the copy stays."""
    import places

    copytree = places.shutil.copytree

    def full(source: Path, to: Path, **more: Any) -> Any:
        copytree(source, to, **more)
        if source.name == "grain":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(places.shutil, "copytree", full)
    found = contest(Programs(), places=("disk",), workers=2)
    assert [run.error for run in found.runs if run.program == "grain"] == [
        "its set can't be brought there: [Errno 28] No space left on device"
    ]
    assert {run.program for run in found.runs if run.round == 1} == {"limit", "ours", "litdata", "energon"}


def test_too_little_room_is_said_before_the_first_set(contest: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed, what is free, and what to do."""
    import contest as module

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    programs = Programs()
    with pytest.raises(OSError, match=r"GB are needed for 4 sets and their copies, 0\.0 are free; .*--count"):
        contest(programs)
    assert programs.ran == []


def test_too_few_photographs_are_said_with_the_cure(tmp_path: Path) -> None:
    """How many there are, how many are asked for, and how to draw more; a folder without any too."""
    import photographs

    source = photos(tmp_path / "source")
    with pytest.raises(
        photographs.PhotographsError, match=r"6 photographs, 9 are asked for; .*COUNT=.*photos\.py FOLDER --count 9"
    ):
        photographs.number(source, tmp_path / "out", 9)
    with pytest.raises(photographs.PhotographsError, match=r"no train\.csv; draw"):
        photographs.number(tmp_path / "nothing", tmp_path / "out", 1)
    assert not (tmp_path / "out").exists()


def test_photographs_are_numbered_anew_when_others_are_named(tmp_path: Path) -> None:
    """The same ones are left as they are; others replace them."""
    import photographs

    source, out = photos(tmp_path / "source"), tmp_path / "out"
    photographs.number(source, out, 3)
    rows = (out / "train.csv").read_text().splitlines()
    assert [row.partition(",")[2] for row in rows[1:]] == ["0", "1", "2"]
    (out / "mark").touch()
    photographs.number(source, out, 3)
    assert (out / "mark").exists()
    photographs.number(photos(tmp_path / "other", 9), out, 5)
    assert not (out / "mark").exists()
    assert len(list(out.rglob("*.jpg"))) == 5


def test_a_cold_disk_has_no_page_of_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root the pages of the copy are dropped, and it is said that inodes stayed; with root all caches are."""
    import places

    source = tmp_path / "sets" / "grain"
    source.mkdir(parents=True)
    (source / "data").write_bytes(os.urandom(2**20))
    (tmp_path / "sets" / "grain.digest").write_text("one")
    drop = tmp_path / "drop_caches"
    monkeypatch.setattr(places, "DROP", drop)
    disk = places.ColdDisk(tmp_path / "sets", tmp_path / "cold")
    assert disk.prepare("grain") == "inodes and folders were warm (not root)"
    assert (tmp_path / "cold" / "grain" / "data").read_bytes() == (source / "data").read_bytes()
    drop.touch()
    assert disk.prepare("grain") == ""
    assert drop.read_text() == "3"


def test_a_copy_is_made_anew_with_its_set(tmp_path: Path) -> None:
    """A set that was written again is copied again; one that wasn't stays."""
    import places

    source, to = tmp_path / "sets" / "grain", tmp_path / "cold"
    source.mkdir(parents=True)
    digest = tmp_path / "sets" / "grain.digest"
    for text in ("one", "two"):
        (source / "data").write_text(text)
        digest.write_text(text)
        assert (places.copied(source, to) / "data").read_text() == text
    (to / "grain" / "mark").touch()
    places.copied(source, to)
    assert (to / "grain" / "mark").exists()


def test_the_page_cache_needs_nothing() -> None:
    """Places say what they lack by what to install."""
    import places

    assert places.lacking("warm", sys.executable) is None
    if os.getuid() == 0:
        lacks = places.lacking("drive", "/bin/false")
        assert lacks is not None and ("apt-get install" in lacks or "pip install mfusepy" in lacks)
    else:
        assert "needs root" in str(places.lacking("drive", sys.executable))


def test_each_program_has_a_script_and_a_writer() -> None:
    """Each program names a script that is there and a set that somebody with a writer writes."""
    from environments import script
    from programs import DATASETS, PROGRAMS

    for program in PROGRAMS.values():
        assert script(program).exists()
        assert "main(None, read)" not in script(PROGRAMS[DATASETS[program.dataset].writer]).read_text()
