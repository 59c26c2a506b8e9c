"""What a benchmark's file of results says: no number of a program at fault, medians, ratios within a round, tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "benchmarks" / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's modules importable."""
    monkeypatch.syspath_prepend(BENCH)


def epoch(seconds: float, **more: Any) -> Any:
    """Return an epoch of 1,000 pictures in ten batches, the first after a tenth of it."""
    from records import Epoch

    arrivals = tuple(seconds * (n + 1) / 10 for n in range(10))
    return Epoch(**{"seconds": seconds, "arrivals": arrivals, "sizes": (100,) * 10, "cpu": seconds * 2, **more})


def made(program: str, number: int | None, *epochs: Any, **more: Any) -> Any:
    """Return a run."""
    from records import Run

    return Run(**{"place": "warm", "job": "problem", "round": number, "program": program, "workers": 2, "epochs": epochs, **more})


def results(*runs: Any) -> Any:
    """Return results of these runs."""
    from records import Results

    machine = {"cpu": "a CPU", "cores": 2, "memory": 2**34, "system": "Linux", "commit": "abc"}
    return Results(machine=machine, settings={"count": 1000, "rounds": 3, "batch": 64}, runs=list(runs))


@pytest.mark.parametrize(
    ("program", "more", "why"),
    [
        ("ours", {}, None),
        ("ours", {"missing": 1}, "epoch 0: 1 pictures didn't come, 0 came more than once"),
        ("ours", {"in_order": 0.9}, "epoch 0: not shuffled: 90%"),
        ("ours", {"repeated": 0.9}, "epoch 0: not shuffled anew: 90%"),
        ("ours", {"black_corners": 0.0}, "epoch 0: 0% of the pictures have the black corner"),
        ("ours", {"dropped_channels": 0.9}, "epoch 0: 90% of the pictures have a dropped channel"),
        ("limit", {"in_order": 0.9, "black_corners": 0.0}, None),
        ("limit", {"doubled": 3}, "epoch 0: 0 pictures didn't come, 3"),
        ("ffcv", {"black_corners": 0.0, "dropped_channels": 0.0}, None),
        ("ours", {"sizes": (49,), "arrivals": (1.0,), "black_corners": 0.0}, None),
    ],
)
def test_what_is_not_the_work_has_no_number(program: str, more: dict[str, Any], why: str | None) -> None:
    """Lost, doubled, unshuffled pictures and another transform are faults; what does less by its note, and few pictures, aren't held to it."""
    from summary import fault

    found = fault(made(program, 0, epoch(1, **more)))
    assert found is None if why is None else str(found).startswith(why)


def test_a_run_that_failed_or_said_nothing_has_no_number() -> None:
    """Its error is the reason."""
    from summary import fault

    assert fault(made("ours", 0, error="exit code 1: no")) == "exit code 1: no"
    assert fault(made("ours", 0)) == "it gave no epoch"


def test_the_jobs_without_rotation_are_not_held_to_it() -> None:
    """Crops and bytes have no black corners."""
    from summary import fault

    for job in ("crop", "bytes"):
        assert fault(made("ours", 0, epoch(1, black_corners=0.0, dropped_channels=0.0), job=job)) is None


def test_medians_and_ratios_of_the_page_cache() -> None:
    """The last epoch counts; shares are of the limit's runs before and after, leads of the same round."""
    from processes import Memory
    from summary import lines

    runs = []
    for number, (limit, ours, grain) in enumerate([(1, 2, 4), (2, 2, 4), (1, 1.25, 2)]):
        last = made("limit", number, epoch(9), epoch(limit))
        runs += [last, made("ours", number, epoch(9), epoch(ours)), made("grain", number, epoch(9), epoch(grain)), last]
    runs.append(made("grain", None, epoch(9), epoch(50), memory=Memory(3, 4, 5)))
    limit, ours, grain = lines(runs, "warm", "problem")
    assert [line.program for line in (limit, ours, grain)] == ["limit", "ours", "grain"]
    assert (ours.rate, grain.rate) == (500, 250)
    assert (ours.share, grain.lead, limit.share, ours.lead) == (0.8, 2, None, None)
    assert (ours.first, ours.second, ours.first_batch) == (9, 2, 0.9)
    assert ours.cpu == 4  # two cores for 2 s, 1,000 pictures
    assert limit.first_batch is None  # its one batch is its whole epoch
    assert grain.memory == Memory(3, 4, 5) and ours.memory is None


def test_drift_of_the_machine_goes_out_of_shares() -> None:
    """A run between a limit of 1,000 and one of 500 images/s is measured by 750."""
    from summary import lines

    runs = [made("limit", 0, epoch(1)), made("grain", 0, epoch(2)), made("limit", 0, epoch(2)), made("litdata", 0, epoch(2))]
    shares = {line.program: line.share for line in lines(runs, "warm", "problem")}
    assert shares == {"limit": None, "grain": pytest.approx(500 / 750), "litdata": 1}


def test_programs_that_do_other_work_have_no_share() -> None:
    """FFCV's and DALI's operators aren't the limit's; ours / it is shown all the same."""
    from summary import lines

    runs = [made(name, 0, epoch(1)) for name in ("limit", "ours", "ffcv", "dali")]
    found = {line.program: line for line in lines(runs, "warm", "problem")}
    assert (found["ffcv"].share, found["dali"].share, found["ours"].share) == (None, None, 1)
    assert found["ffcv"].lead == 1


def test_cold_disks_are_ranked_by_their_first_epoch() -> None:
    """A loader that is slow from the disk and fast from memory comes behind one that is neither."""
    from summary import lines

    drive = {"seeks": 10, "seek_s": 1.5, "transfer_s": 0.5}
    runs = [
        made("question", 0, epoch(9, drive=drive), epoch(1), place="drive"),
        made("ours", 0, epoch(3, drive=drive), epoch(2), place="drive"),
        made("limit", 0, epoch(9), epoch(1), place="drive"),
    ]
    limit, ours, question = lines(runs, "drive", "problem")
    assert (limit.rate, ours.program, question.program) == (1000, "ours", "question")
    assert (ours.rate, ours.share, question.lead) == pytest.approx((1000 / 3, 1 / 3, 3))
    assert (ours.seeks, ours.busy) == (10, 2)


def test_the_steady_state_begins_after_a_quarter_of_the_batches() -> None:
    """A first batch that took half of the epoch is out of it; with one batch there is none."""
    from summary import steady

    late = tuple(5 + 0.5 * n for n in range(11))[1:]
    assert steady(epoch(10, arrivals=late)) == pytest.approx(800 / 4)
    assert steady(epoch(10, sizes=(1000,), arrivals=(10.0,))) is None


def test_one_fault_takes_all_numbers_but_a_failed_watch_only_the_memory() -> None:
    """A program that lost a picture in one round has no number; one whose memory couldn't be watched keeps its times."""
    from summary import lines

    runs = [made("grain", n, epoch(1, missing=int(n == 1))) for n in range(3)]
    runs += [made("ours", 0, epoch(1)), made("ours", None, error="it took longer than 900 s")]
    ours, grain = lines(runs, "warm", "problem")
    assert (ours.rate, ours.memory, ours.why) == (1000, None, None)
    assert grain.rate is None and grain.why == "epoch 0: 1 pictures didn't come, 0 came more than once"


def test_tables_are_of_the_file_alone(tmp_path: Path) -> None:
    """What is written and read again gives the same tables; each program has its note, what failed its reason, what is absent its cause."""
    from processes import Memory
    from records import Trial, Written, load
    from tables import failures, tables

    found = results(
        made("limit", 0, epoch(1)),
        made("ours", 0, epoch(1.25)),
        made("grain", 0, error="exit code 1: no"),
        made("ours", None, epoch(1), memory=Memory(10**8, 2 * 10**7, 3 * 10**6)),
        made("ours", 0, epoch(4, drive={"seeks": 7, "seek_s": 1, "transfer_s": 1}), epoch(2), place="drive", made="in use"),
    )
    found.sets["grain"] = Written(digest="d", seconds=(3.0, 1.0, 2.0), bytes=10**8, files=17, date="2026-12-01")
    found.absent["ffcv"] = "no compiler"
    found.trials.append(Trial(place="warm", job="problem", program="ours", rates={1: 50.0, 2: 100.0}))
    found.save(tmp_path / "results.json")
    again = load(tmp_path / "results.json")
    assert again == found
    shown = "\n".join(tables(again)).splitlines()
    warm = "| ours | 2 | 800 | 800 | 0.80 | 0.1 | 2.50 | 120 | 20 | 3 |  |"
    cold = "| ours | 2 | 250 | 250 | 4.0 | 2.0 | 2.00 | 0.4 | 8.00 | 7 | 2.0 | in use |"
    assert [line for line in shown if line.startswith("| ours")] == [warm, cold]
    assert "| grain | 2 | - | - | - | - | - | - | - | - | exit code 1: no |" in shown
    assert "| grain | 2.0 | 100.0 | 17 | one process; 3 times, 2026-12-01 |" in shown
    assert shown[-1] == "Not measured: ffcv (no compiler)."
    assert failures(again.runs) == {"grain (warm, problem)": "exit code 1: no"}


def test_a_file_of_results_has_a_line_for_each_run(tmp_path: Path) -> None:
    """It is JSON that can be compared line by line, and an older file is there until the new one is whole."""
    found = results(made("ours", 0, epoch(1)), made("ours", 1, epoch(2)))
    found.save(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text()
    assert len(json.loads(text)["runs"]) == 2
    assert sum('"round"' in line for line in text.splitlines()) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_figures_are_the_same_for_the_same_results(tmp_path: Path) -> None:
    """A figure for each place and job that has numbers; the limit is a line, first and last epochs stand side by side."""
    pytest.importorskip("matplotlib", reason="pip install -e '.[bench]'")
    import plots

    found = results(
        made("limit", 0, epoch(1)),
        made("ours", 0, epoch(1.25)),
        made("ffcv", 0, epoch(2)),
        made("ours", 0, epoch(4), epoch(2), place="drive"),
        made("grain", 0, error="no", job="crop"),
    )
    names = [file.name for file in plots.draw(found, tmp_path / "a")]
    assert names == ["a-warm-problem.svg", "a-warm-problem.png", "a-drive-problem.svg", "a-drive-problem.png"]
    plots.draw(found, tmp_path / "b")
    first, second = ((tmp_path / f"{stem}-warm-problem.svg").read_bytes() for stem in "ab")
    assert first == second
    assert (tmp_path / "a-drive-problem.png").stat().st_size > 5_000


@pytest.fixture
def told() -> list[list[str]]:
    """The cells of the README's tables behind each row's first."""
    readme = (BENCH.parent.parent / "README.md").read_text()
    return [[cell.strip("* ") for cell in row.split("|")[2:-1]] for row in readme.splitlines()]


def published(name: str, place: str, job: str = "problem") -> list[Any]:
    """Return the lines of published results."""
    from records import load
    from summary import lines

    return lines(load(BENCH.parent / "results" / name).runs, place, job)


def test_the_readme_says_what_the_results_say(told: list[list[str]]) -> None:
    """Each program of the published results stands in the README's table with its workers, rate, share, lead and CPU."""
    from records import load

    shown = [line for line in published("2026-12-03-warm.json", "warm") if line.program != "ram"]
    workers = {run.program: run.workers for run in load(BENCH.parent / "results" / "2026-12-03-warm.json").runs}
    assert len(shown) == 15
    for line in shown:
        share, lead = ("" if value is None else f"{value:.2f}" for value in (line.share, line.lead))
        assert [f"{workers[line.program]}", f"{line.rate:.0f}", share, lead, f"{line.cpu:.2f}"] in told, line.program


def test_the_readme_says_what_the_cold_results_say(told: list[list[str]]) -> None:
    """Each program stands with its first epoch, ours by it, both epochs' seconds and its seeks; of two settings the faster one."""
    slower = {"dali": "dali-read", "ffcv": "ffcv-quasi"}
    found = {line.program: line for line in published("2026-12-02-drive.json", "drive") if line.program != "limit"}
    assert len(found) == 14
    for name, better in slower.items():
        assert found.pop(name).rate < found[better].rate
    for line in found.values():
        lead = "" if line.lead is None else f"{line.lead:.2f}"
        seconds = [f"{line.first:.1f}", f"{line.second:.1f}"]
        assert [f"{line.rate:.0f}", lead, *seconds, f"{line.seeks:,.0f}"] in told, line.program


def test_the_readme_says_what_the_results_of_all_pictures_say(told: list[list[str]]) -> None:
    """Both epochs, each with ours by it within a round, seeks, and the first epoch where nothing is decoded."""
    from statistics import median

    from records import load

    rounds: dict[str, list[Any]] = {}
    for run in load(BENCH.parent / "results" / "2026-12-03-nine.json").runs:
        rounds.setdefault(run.program, []).append(run.epochs)
    found, reading = (
        {line.program: line for line in published(f"2026-12-03-{name}.json", "drive", job)}
        for name, job in (("nine", "problem"), ("nine-bytes", "bytes"))
    )
    for name in ("ours", "squashfs", "question"):
        assert len(rounds[name]) == 5
        line = found[name]
        later = median(it[1].seconds / own[1].seconds for it, own in zip(rounds[name], rounds["ours"], strict=True))
        leads = ["" if name == "ours" else f"{lead:.2f}" for lead in (line.lead or 0, later, reading[name].lead or 0)]
        row = [f"{line.first:.1f}", leads[0], f"{line.second:.1f}", leads[1], f"{line.seeks:,.0f}"]
        assert [*row, f"{reading[name].first:.1f}", leads[2]] in told, name


def test_readme_and_page_say_what_the_crops_results_say() -> None:
    """Each program's rate stands in the sentence on job "crop", and ours' share of the limit."""
    root = BENCH.parent.parent
    found = {line.program: line for line in published("2026-12-02-crop.json", "warm", "crop") if line.program != "limit"}
    assert len(found) == 8
    for text in ((root / "README.md").read_text(), (root / "docs" / "PERFORMANCE.md").read_text()):
        told = " ".join(text.split())
        names = {
            "dali": "DALI",
            "webdataset": "webdataset",
            "grain": "Grain",
            "spdl-cv2": "SPDL with the same transform",
            "ffcv": "FFCV",
        }
        for name, shown in (names | {"spdl": "SPDL with FFmpeg's decoder"}).items():
            assert f"{shown} {found[name].rate:.0f}" in told
        for name in ("ours", "ours-scaled"):
            assert f"{found[name].rate:,.0f}" in told
        assert f"{found['ours'].share:.2f}" in told


def test_the_page_says_what_the_results_of_small_pictures_say() -> None:
    """Rates of the first epoch from a cold drive, and of the last from the page cache."""
    text = (BENCH.parent.parent / "docs" / "PERFORMANCE.md").read_text()
    told = [[cell.strip() for cell in row.split("|")[4:-1]] for row in text.splitlines()]
    cold, warm = ({line.program: line for line in published("2026-12-02-small.json", place)} for place in ("drive", "warm"))
    for name in ("ours", "ours-small", "litdata-small", "ffcv-small"):
        assert [f"{cold[name].rate:.0f}", f"{warm[name].rate:.0f}"] in told, name


def test_readme_and_page_say_what_the_results_over_http_say() -> None:
    """The first epoch's rate of each program, and on the page the steady one and the first batch."""
    root = BENCH.parent.parent
    found = {line.program: line for line in published("2026-12-03-http.json", "http")}
    readme, page = (" ".join((root / name).read_text().split()) for name in ("README.md", "docs/PERFORMANCE.md"))
    ours, webdataset, datasets = (found[name] for name in ("ours", "webdataset", "datasets"))
    told = f"ours {ours.rate:.0f} images/s in the first epoch, webdataset {webdataset.rate:.0f}, Hugging Face datasets {datasets.rate:.0f}"
    assert told in readme
    assert (
        f"{ours.rate:.0f} images/s in the first epoch, from before the loader is made, and {ours.steady:.0f} once batches come"
        in page
    )
    for name, line in (("webdataset", webdataset), ("Hugging Face datasets", datasets)):
        assert f"{name} {line.rate:.0f} and {line.steady:.0f}" in page
    assert (
        f"its first batch came after {ours.first_batch:.1f} s, webdataset's after {webdataset.first_batch:.1f}, datasets' after"
        in page
    )
