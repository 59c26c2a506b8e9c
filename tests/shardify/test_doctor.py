"""Doctor: what lies in a folder, how it is read, what an epoch takes; and that no odd folder makes it crash."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from gallery import Gallery, Silent, make_gallery
from hypothesis import given
from hypothesis import strategies as st
from packing import PackedSet, jpeg, pack, write_tar

from shardify.__main__ import app
from shardify.doctor import DEEP, Report, Settings, contents, decoding, examine, forecast, gauge, medium
from shardify.doctor.forecast import Curve, Machine, name_seconds, read_ahead, read_one_by_one, warm
from shardify.doctor.report import EPOCHS, duration
from shardify.errors import FormatError, SettingsError

QUICK = 0.15  # seconds
JPG = frozenset({"jpg"})
rates = st.floats(1, 1e5)
costs = st.floats(1e-5, 1)
crews = st.integers(0, 64)
cores = st.integers(1, 64)


def checked(path: Path, **settings: object) -> Report:
    """Examine a path in a moment."""
    return examine(path, Settings(**{"seconds": QUICK, "workers": 2} | settings), Silent(), random.Random(1))  # type: ignore[arg-type]


def run(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, stdout, stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        app(["doctor", *map(str, arguments)], prog_name="shardify")
    return int(ended.value.code or 0), out.getvalue(), errors.getvalue()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """40 pictures in about as many folders, and a table beside them."""
    return make_gallery(tmp_path_factory.mktemp("gallery"), 40)


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a file system that can forget a file's pages (a memory file system can't)."""
    for place in (Path(tempfile.gettempdir()), Path.cwd()):
        if os.access(place, os.W_OK) and not medium.find(place).is_memory:
            folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=place))
            yield folder
            shutil.rmtree(folder)
            return
    pytest.skip("no folder here that isn't in memory")


# What an epoch takes


@given(rates, costs, cores)
def test_one_worker_takes_the_sum(rate: float, cost: float, cpus: int) -> None:
    """With one worker, or none, reading and computing come one after the other: the times add up, exactly."""
    for workers in (0, 1):
        epoch = read_one_by_one(100, Curve(((1, rate),)), Machine(workers, cpus, cost))
        assert epoch.seconds == pytest.approx(100 * (1 / rate + cost))


@given(rates, rates, rates, costs, crews, cores)
def test_no_epoch_beats_its_bottleneck(one: float, few: float, deep: float, cost: float, workers: int, cpus: int) -> None:
    """Neither disk nor CPU is ever asked for more than it has, and an epoch is never slower than one worker's."""
    disk, machine = Curve(((1, one), (4, few), (16, deep))), Machine(workers, cpus, cost)
    epoch = read_one_by_one(1000, disk, machine)
    assert epoch.per_second <= min(max(one, few, deep), machine.warm_rate) * (1 + 1e-9)
    slowest = 1 / (1 / min(one, few, deep) + cost)
    assert epoch.per_second >= slowest * (1 - 1e-9)
    assert epoch.seconds == pytest.approx(1000 / epoch.per_second)


@given(rates, costs, cores)
def test_more_workers_are_never_slower_where_the_disk_isnt(rate: float, cost: float, cpus: int) -> None:
    """On a disk of constant speed each worker more helps, up to the slower of disk and CPU."""
    crew = [1, 2, 4, 8, 64, 1000]
    speeds = [read_one_by_one(1, Curve(((1, rate),)), Machine(workers, cpus, cost)).per_second for workers in crew]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(speeds))
    assert speeds[-1] >= 0.9 * min(rate, cpus / cost)


def test_the_queue_against_a_simulation() -> None:
    """The formula gives what a simulated crew achieves: three workers, two CPUs, a disk that is slower when asked by several."""
    disk, machine = Curve(((1, 100.0), (2, 60.0), (3, 90.0))), Machine(3, 2, 0.012)
    rng, waiting, clock, served = random.Random(0), 3, 0.0, 0
    while served < 40_000:
        reading, computing = (disk(waiting) if waiting else 0.0), min(3 - waiting, 2) / 0.012
        clock += rng.expovariate(reading + computing)
        finished = rng.random() < reading / (reading + computing)
        waiting += -1 if finished else 1
        served += finished
    assert read_one_by_one(1, disk, machine).per_second == pytest.approx(served / clock, rel=0.03)


def test_the_limit_is_named() -> None:
    """What an epoch waits for is said: the disk, or the CPU."""
    slow, fast = Curve(((1, 50.0),)), Curve(((1, 5000.0),))
    machine = Machine(4, 4, 0.01)
    assert (read_one_by_one(1, slow, machine).limit, read_one_by_one(1, fast, machine).limit) == ("disk", "CPU")
    assert (read_ahead(1, 50, machine).limit, read_ahead(1, 5000, machine).limit, warm(1, machine).limit) == ("disk", "CPU", "CPU")
    assert read_ahead(100, 50, machine).seconds == 2 and warm(400, machine).seconds == pytest.approx(1)


@given(st.dictionaries(st.integers(1, 64), rates, min_size=1, max_size=4), st.integers(1, 100))
def test_a_curve_goes_through_its_points(points: dict[int, float], depth: int) -> None:
    """Measured speeds are met exactly; between them, and beyond, none is invented that is faster or slower than all of them."""
    curve = Curve(tuple(points.items()))
    assert all(curve(at) == pytest.approx(rate) for at, rate in points.items())
    assert min(points.values()) * (1 - 1e-9) <= curve(depth) <= max(points.values()) * (1 + 1e-9)


@given(rates, rates, rates, st.floats(0, 1), st.integers(1, 16))
def test_a_cold_file_costs_its_name_too(one: float, all_: float, asked: float, names: float, waiting: int) -> None:
    """A file takes its data's time, at best that of all workers at work, and its name's, which single requests bring."""
    data, requests = Curve(((1, one), (16, all_))), Curve(((1, one), (16, asked)))
    files = forecast.cold_files(data, requests, names, 16)
    assert 1 / files(waiting) >= max(1 / data(waiting), 1 / all_) * (1 - 1e-9)
    assert 1 / files(1) == pytest.approx(max(1 / one, 1 / all_) + names)
    assert 1 / files(16) == pytest.approx(1 / all_ + names * one / asked)


@pytest.mark.parametrize(("pictures", "folders"), [(2_000, 1_600), (9_000, 4_000), (50_000, 400), (400_000, 1)])
def test_names_are_paid_once_a_neighborhood(pictures: int, folders: int) -> None:
    """From a sample of 300 the cost of all names and inodes is foretold, though nearly every file of a sample pays for its folder.

    The simulated disk: 10 ms a read; a folder's first file costs two, a run of 512 inodes one, of 64 upper folders two each.
    """
    rng, known = random.Random(3), set[tuple[str, int]]()

    def look_up(number: int) -> float:
        folder = number % folders
        needs = [("folder", folder), ("folder", -1 - folder), ("inodes", number // 512 if folders == 1 else folder % 64)]
        needs += [("upper", folder % 64), ("upper", -1 - folder % 64)]
        fresh = set(needs) - known
        known.update(fresh)
        return 0.01 * len(fresh)

    order = rng.sample(range(pictures), pictures)
    spent = [look_up(number) for number in order]
    foretold = name_seconds([0.008 + seconds for seconds in spent[:300]], 0.008, pictures, folders)
    assert foretold == pytest.approx(sum(spent), rel=0.25)


def test_names_without_a_sample_cost_nothing() -> None:
    """Where no name was cold, or a cold file took no longer, nothing is added."""
    assert name_seconds([], 0.01, 100, 10) == 0
    assert name_seconds([0.01] * 50, 0.01, 100, 10) == 0


def test_durations() -> None:
    """A time is told in two units at most."""
    assert [duration(s) for s in (0.0123, 12.34, 99.9)] == ["0.0123 s", "12.3 s", "99.9 s"]
    assert [duration(s) for s in (100, 7384, 200_000)] == ["1 min 40 s", "2 h 3 min", "2 d 7 h"]


# What lies there


def test_a_tree_is_counted(gallery: Gallery) -> None:
    """Given time, pictures and folders are counted exactly, and a drawn sample repeats none."""
    listing = contents.look(gallery.root, JPG, 60, random.Random(0))
    folders = {path.parent for path in gallery.root.rglob("*.jpg")}
    assert listing.exact and not listing.troubles
    assert (listing.pictures.count, listing.pictures.folders, listing.others) == (40, len(folders), 1)
    drawn = listing.pictures.draw(30, random.Random(0))
    assert len(drawn) == len(set(drawn)) == 30 and all(Path(path).is_file() for path in drawn)
    assert sorted(listing.pictures.draw(1000, random.Random(0))) == sorted(map(str, gallery.root.rglob("*.jpg")))


def test_without_time_a_tree_is_estimated(tmp_path: Path) -> None:
    """A level that would take too long is counted by a random part of it, and so is what lies below."""
    for number in range(600):
        folder = tmp_path / f"{number % 300}" / f"{number}"
        folder.mkdir(parents=True)
        for picture in range(3):
            (folder / f"{picture}.jpg").touch()
    listing = contents.look(tmp_path, JPG, 0, random.Random(0))
    assert not listing.exact
    assert listing.pictures.count == pytest.approx(1800, rel=0.2) and listing.pictures.folders == pytest.approx(600, rel=0.2)
    assert len(listing.pictures.draw(1000, random.Random(0))) >= 3 * contents._LEAST


def test_every_folder_has_its_chance(tmp_path: Path) -> None:
    """Samples are random over the whole tree: each picture, in whichever folder and level, comes as often as any other."""
    for name in ("a.jpg", "x/b.jpg", "x/c.jpg", "x/y/d.jpg", "z/e.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    seen = [Path(contents.look(tmp_path, JPG, 60, random.Random(n)).pictures.draw(5, random.Random(n))[0]).stem for n in range(300)]
    assert all(seen.count(name) in range(35, 90) for name in "abcde"), {name: seen.count(name) for name in "abcde"}


def test_what_is_no_picture_is_passed_over(tmp_path: Path) -> None:
    """Hidden files, pipes, links in a circle, links to folders and other files are no pictures; upper-case names are."""
    (tmp_path / "A.JPG").write_bytes(jpeg(0))
    (tmp_path / "linked.jpg").symlink_to("A.JPG")
    (tmp_path / ".hidden.jpg").write_bytes(jpeg(1))
    (tmp_path / "round.jpg").symlink_to("round.jpg")
    (tmp_path / "back").symlink_to(tmp_path)
    (tmp_path / "notes.txt").touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    listing = contents.look(tmp_path, JPG, 60, random.Random(0))
    assert sorted(Path(path).name for path in listing.pictures.draw(9, random.Random(0))) == ["A.JPG", "linked.jpg"]


def test_shards_are_counted_by_their_manifest(small_set: PackedSet) -> None:
    """A packed set's samples and bytes are those of its manifest, exactly."""
    holding = checked(small_set.folder).holding
    size = sum(path.stat().st_size for path in small_set.folder.glob("*.tar"))
    assert (holding.kind, holding.pictures, holding.shards, holding.bytes, holding.exact) == ("shards", 200, 4, size, True)


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_of_others_are_estimated(small_set: PackedSet, tmp_path: Path, indexed: bool) -> None:
    """Without a manifest the samples are estimated, by indexes or by the first headers of a tar; and that is said."""
    for path in small_set.folder.glob("*.*"):
        if path.suffix == ".tar" or (indexed and path.suffix == ".idx"):
            shutil.copy(path, tmp_path)
    report = checked(tmp_path)
    assert report.holding.pictures == pytest.approx(200, rel=0.05) and not report.holding.exact
    assert any("estimates" in note for note in report.notes)


def test_a_damaged_tar_is_named(tmp_path: Path) -> None:
    """A tar that is none is a problem, with its name; the rest is measured."""
    write_tar(tmp_path / "good.tar", [(f"k{n}", [("jpg", jpeg(n)), ("cls", b"1")]) for n in range(20)])
    (tmp_path / "bad.tar").write_bytes(b"\1" * 5000)
    report = checked(tmp_path)
    assert any("bad.tar" in problem for problem in report.problems)
    assert report.epochs


# What it lies on


def test_the_medium_is_found(tmp_path: Path) -> None:
    """Mount point, file system and source are those of the innermost mount over a path; later mounts hide earlier ones."""
    mounts = tmp_path / "mountinfo"

    def write(*lines: str) -> None:
        mounts.write_text("".join(f"{line}\n" for line in ("1 0 8:1 / / rw - ext4 /dev/none rw", *lines)))

    where = str(tmp_path).replace(" ", "\\040")
    write(f"2 1 0:40 / {where} rw shared:1 - ext4 /dev/none2 rw", f"3 1 0:41 / {where} rw - nfs4 server:/a\\040b rw")
    found = medium.find(tmp_path, mounts)
    assert (found.mount, found.filesystem, found.source, found.kind) == (str(tmp_path), "nfs4", "server:/a b", "network")
    assert found.has_own_cache
    for kind, words in (("tmpfs", "memory"), ("fuse.sshfs", "user-space"), ("overlay", "layers"), ("squashfs", "")):
        write(f"2 1 0:40 / {where} rw - {kind} it rw")
        found = medium.find(tmp_path, mounts)
        assert found.filesystem == kind and (words in found.kind or found.rotational is not None)
    assert medium.find(tmp_path, tmp_path / "none").filesystem == ""


def test_the_page_cache_is_seen_and_emptied(on_disk: Path) -> None:
    """The share in memory is 1 after reading and 0 after evicting, which what was just written needs to be written back for."""
    path = on_disk / "a.bin"
    path.write_bytes(os.urandom(300_000))
    assert medium.cached_share([str(path)]) == 1
    troubles: contents.Troubles = []
    gauge.write_back()
    assert gauge.evict([str(path)], 60, troubles) == [gauge.Span(str(path), 0, 300_000)]
    assert medium.cached_share([str(path)]) == 0 and not troubles
    path.read_bytes()
    assert medium.cached_share([str(path)]) == 1


def test_a_part_of_the_page_cache(on_disk: Path) -> None:
    """The share counts pages, of all files together; empty ones and those that are gone don't count."""
    for name, size in (("a", 40 * 4096), ("b", 60 * 4096), ("empty", 0)):
        (on_disk / name).write_bytes(bytes(size))
    gauge.write_back()
    gauge.evict([str(on_disk / "b")], 60, [])
    paths = [str(on_disk / name) for name in ("a", "b", "empty", "gone")]
    assert medium.cached_share(paths) == pytest.approx(0.4)
    assert medium.cached_share(paths[2:]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_other_users_files(on_disk: Path) -> None:
    """Of another user's files the share in memory is unknown (the kernel would say: all), and they are measured all the same."""
    on_disk.chmod(0o755)
    (on_disk / "a.jpg").write_bytes(jpeg(0))
    code = (
        "import os, sys; from shardify.doctor import medium, gauge\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(medium.cached_share(sys.argv[1:]), gauge.evict(sys.argv[1:], 9, [])[0].size)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(on_disk / "a.jpg")], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["None", str(len(jpeg(0)))], result.stderr


# How it is read


def test_random_reads_read_it_all(gallery: Gallery) -> None:
    """With enough time each piece is read once, in whole, at any depth; what is gone meanwhile isn't counted."""
    spans = [gauge.Span(str(path), 0, path.stat().st_size) for path in gallery.root.rglob("*.jpg")]
    mean = sum(span.size for span in spans) // len(spans)
    for depth in (1, 7, 100):
        for whole in (True, False):
            reads = gauge.read_random([*spans, gauge.Span("/gone", 0, 9)], depth, 60, whole=whole)
            assert reads is not None
            assert (len(reads.seconds), reads.mean_bytes, reads.depth) == (40, mean, min(depth, 41))
            assert 0 < reads.per_second < 1e6
    assert gauge.read_random([gauge.Span("/gone", 0, 9)], 2, 60) is None
    assert gauge.read_random([], 2, 60) is None


def test_a_measurement_ends_in_time(gallery: Gallery) -> None:
    """Without time each thread still reads one piece, and no more."""
    spans = [gauge.Span(str(path), 0, 100) for path in gallery.root.rglob("*.jpg")]
    reads = gauge.read_random(spans, 4, 0)
    assert reads is not None and len(reads.seconds) == 4


def test_reading_forward(tmp_path: Path) -> None:
    """Reading forward takes all bytes of files and pieces, in blocks' order where the file system tells it."""
    path = tmp_path / "big"
    path.write_bytes(bytes(9_000_000))
    spans = [gauge.Span(str(path), 0, 9_000_000), gauge.Span("/gone", 0, 5), gauge.Span(str(path), 8_000_000, 5_000_000)]
    found = gauge.read_forward(spans, 60, "files")
    assert found is not None and found.bytes_per_second > 0 and found.source == "files"
    assert sorted(gauge.in_disk_order(spans), key=str) == sorted((spans[0], spans[2]), key=str)
    assert gauge.read_forward(spans[1:2], 60, "files") is None


def test_the_disk_itself(on_disk: Path) -> None:
    """A part of the disk is only named where it can be read; what is read there is no part of a file system's cache that stays."""
    path = on_disk / "a"
    path.write_bytes(os.urandom(100_000))
    os.sync()
    found = gauge.on_disk([gauge.Span(str(path), 0, 100_000)], 10**6)
    if found is None:
        pytest.skip("the disk can't be read here")
    assert found.size == 10**6 and os.access(found.path, os.R_OK)
    assert gauge.read_random([found], 1, 60, whole=True) is not None


# What the CPU takes


def test_decoding_is_measured() -> None:
    """Larger pictures take longer; what doesn't decode is left out, and nothing but that gives no figure."""
    small, large = jpeg(0), jpeg(0, 480, 640)
    times = [decoding.decode_seconds([picture, b"text"], 2, 0.1) for picture in (small, large)]
    assert times[0] is not None and times[1] is not None and 0 < times[0] < times[1]
    assert decoding.decode_seconds([b"text", b"", large[:-2]], 2, 0.1) is None
    assert decoding.megapixels(large) == pytest.approx(0.3072) and decoding.megapixels(b"text") == 0


@pytest.mark.case("A06")
def test_two_opencv_wheels_are_named(tmp_path: Path) -> None:
    """Wheels that overwrite each other's files are named with their versions and the cure (case A06); one alone is fine."""

    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    install("opencv-python-headless", "4.11.0.86")
    assert decoding.opencv_problems([str(tmp_path)]) == []
    install("opencv_python", "4.12.0.88")
    (problem,) = decoding.opencv_problems([str(tmp_path)])
    for part in (
        "opencv-python-headless 4.11.0.86",
        "opencv-python 4.12.0.88",
        "pip uninstall -y opencv-python opencv-python-headless",
    ):
        assert part in problem


def test_this_environment_is_sound() -> None:
    """The project itself brings one OpenCV wheel, and it loads."""
    assert decoding.opencv_problems() == []


# All of it


def test_files_from_end_to_end(gallery: Gallery) -> None:
    """A folder of pictures gets all figures and all epochs; without --drop-caches it says that names and inodes were in memory."""
    report = checked(gallery.root)
    assert (report.holding.kind, report.holding.pictures) == ("files", 40)
    assert set(report.epochs) == set(EPOCHS) and not report.problems
    assert {reads.depth for reads in report.disk.data} == {1, 2, DEEP} and not report.disk.cold
    assert report.cpu is not None and report.cpu.cpus >= 1 and not report.cpu.transform_stated
    assert report.medium.is_memory or any("--drop-caches" in note for note in report.notes)
    assert report.epochs["files"].seconds >= report.epochs["files_warm"].seconds > report.epochs["shards_warm"].seconds


def test_shards_from_end_to_end(small_set: PackedSet) -> None:
    """A folder of shards, one tar and a manifest get all epochs; those as files are a lower bound, and it is said."""
    for path in (small_set.folder, small_set.folder / "train-000001.tar", small_set.folder / "train-shardindex.json"):
        report = checked(path, workers=0)
        assert set(report.epochs) == set(EPOCHS) and not report.problems
        assert report.holding.pictures == pytest.approx(50 if path.suffix == ".tar" else 200, rel=0.05)
        assert any("lower bound" in note for note in report.notes)


def test_a_transforms_cost_is_taken_as_stated(gallery: Gallery) -> None:
    """A stated cost takes the place of the assumed one, and the epochs follow."""
    report = checked(gallery.root, transform_seconds=0.5)
    assert report.cpu is not None and (report.cpu.transform_seconds, report.cpu.transform_stated) == (0.5, True)
    cpus = min(2, report.cpu.cpus)
    assert report.epochs["shards_warm"].seconds == pytest.approx(40 * (0.5 + report.cpu.decode_seconds) / cpus)
    assert report.epochs["files_warm"].seconds == pytest.approx(report.epochs["shards_warm"].seconds * forecast.PLAIN_COST)


def test_pictures_beside_shards_are_told_of(tmp_path: Path) -> None:
    """Where tars and pictures lie in one folder the tars are measured, and it says that the pictures weren't."""
    pack(tmp_path, 20, 1)
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    report = checked(tmp_path)
    assert report.holding.kind == "shards" and any("1 pictures" in note for note in report.notes)


def test_odd_places(tmp_path: Path) -> None:
    """An empty folder, no pictures, text named as pictures, an empty tar and a broken link: words, not a crash."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jpg").write_text("hello")
    (tmp_path / "texts" / "zero.jpg").touch()
    (tmp_path / "zeros").mkdir()
    (tmp_path / "zeros" / "a.tar").write_bytes(bytes(10240))
    (tmp_path / "zeros" / "none.tar").touch()
    for name, words in (("empty", "no picture and no tar"), ("texts", "decodes"), ("zeros", "no sample")):
        report = checked(tmp_path / name)
        assert any(words in problem for problem in report.problems), (name, report.problems)
        assert not report.epochs and report.lines() and json.dumps(report.facts())
    (tmp_path / "broken").symlink_to("none")
    with pytest.raises(SettingsError, match="no such file or folder"):
        checked(tmp_path / "broken")
    (tmp_path / "cut-shardindex.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        checked(tmp_path / "cut-shardindex.json")


def test_one_picture(tmp_path: Path) -> None:
    """A single picture is measured as a set of one."""
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    report = checked(tmp_path / "a.jpg")
    assert report.holding.pictures == 1 and set(report.epochs) == set(EPOCHS)
    assert [reads.depth for reads in report.disk.data] == [1]


def test_nothing_is_written(gallery: Gallery) -> None:
    """A folder is left as it was: no file more, none changed."""
    before = {path: path.stat().st_mtime_ns for path in gallery.root.rglob("*")}
    checked(gallery.root)
    assert {path: path.stat().st_mtime_ns for path in gallery.root.rglob("*")} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cant_be_read_is_counted(tmp_path: Path) -> None:
    """Unreadable files and folders are problems, each cause once with its first place and how many; the rest is measured."""
    for number in range(9):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
        (tmp_path / f"{number}.jpg").chmod(0o600 if number > 3 else 0)
    (tmp_path / "closed").mkdir(0)
    report = checked(tmp_path)
    assert any("Permission denied (and 4 more" in problem for problem in report.problems) and report.epochs


def test_caches_cant_be_dropped(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to, --drop-caches is refused with the way out, before anything is listed or measured."""
    monkeypatch.setattr(gauge, "_DROP", Path("/sys/kernel/uevent_seqnum"))  # which nobody may write
    with pytest.raises(SettingsError, match="needs root"):
        checked(gallery.root, drop_caches=True)


def test_the_command(gallery: Gallery, tmp_path: Path) -> None:
    """`doctor` prints figures on stdout and remarks on stderr; --json one object; a folder without pictures exits with 1, none with 2."""
    code, told, remarks = run(gallery.root, "--seconds", "1", "--workers", "1")
    assert code == 0, remarks
    for words in ("40 pictures", "random reads", "sequential", *EPOCHS.values()):
        assert words in told
    assert "--drop-caches" in remarks
    code, told, _ = run(gallery.root, "--seconds", "1", "--transform-ms", "2", "--json")
    facts = json.loads(told)
    assert code == 0 and facts["problems"] == [] and facts["cpu"]["transform_seconds"] == 0.002
    assert set(facts["epochs"]) == set(EPOCHS) and {"seconds", "per_second", "limit"} == set(facts["epochs"]["files"])
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty")[0] == 1
    assert run(tmp_path / "none")[0] == 2
