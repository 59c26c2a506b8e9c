"""Builds that run out of room, of files or of their user's patience, and resumes that must be refused: each says why and how to go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import pytest
from gallery import make_gallery, tree
from packing import jpeg
from resuming import PICTURES, PLENTY, Scene, finished, in_memory
from struck import Outcome, Strike, Strikes

from shardify.config.models import LEAST_MEMORY

READING, WRITING = Strike("reading", PICTURES * 2 // 3), Strike("writing", PICTURES // 2)
HALF_READ, HALF_WRITTEN = "half read", "half written"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory in the place of pytest's."""
    with in_memory() as folder:
        yield folder


@pytest.fixture(scope="module")
def strikes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strikes]:
    """The server that forks builds."""
    server = Strikes(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def scene(strikes: Strikes) -> Iterator[Scene]:
    """The source and its undisturbed build."""
    with in_memory() as folder:
        yield Scene.make(folder, strikes)


@pytest.fixture
def copied(scene: Scene, tmp_path: Path) -> Scene:
    """The scene with a source of its own, which a test may change."""
    root = shutil.copytree(scene.gallery.root, tmp_path / "copied")
    return replace(scene, gallery=replace(scene.gallery, root=root))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", folder], check=False).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def give_room(disk: Path, size: str = "64M") -> None:
    """Make a tmpfs larger."""
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


@pytest.mark.parametrize(("memory", "moment"), [(LEAST_MEMORY, READING), (PLENTY, WRITING), (LEAST_MEMORY, WRITING)])
def test_a_full_disk(scene: Scene, small_disk: Path, memory: int, moment: Strike) -> None:
    """A disk that others fill up meanwhile: the build says so and how to go on; with more room it does."""
    out = small_disk / "out"
    full = scene.build(out, memory=memory, strike=replace(moment, how="fill", path=str(small_disk / "others")))
    assert full.code == 3 and full.struck
    assert "No space left" in full.error and "--resume" in full.error
    still = scene.build(out, resume=True, memory=memory)
    assert still.code == 3 and "--resume" in still.error
    give_room(small_disk)
    scene.resume_to_the_end(out, memory=memory)


def test_a_disk_that_is_too_small_is_seen_beforehand(scene: Scene, small_disk: Path) -> None:
    """Room for output and spool is looked for before any picture is read; the message says how much is needed and how much is there."""
    give_room(small_disk, "3M")
    refused = scene.build(small_disk / "out")
    assert refused.code == 3 and refused.phases.get("reading", 0) == 0
    assert "free" in refused.error and str(small_disk) in refused.error
    assert not (small_disk / "out").exists()
    give_room(small_disk)
    scene.resume_to_the_end(small_disk / "out")


@pytest.mark.parametrize(("memory", "most"), [(LEAST_MEMORY, 100_000), (PLENTY, 200_000)], ids=["spool", "shard"])
def test_a_file_that_may_not_grow(scene: Scene, tmp_path: Path, memory: int, most: int) -> None:
    """A limit on the size of files is an error that names the file; without it the build goes on (or begins anew)."""
    limited = scene.build(tmp_path / "out", memory=memory, limits={"RLIMIT_FSIZE": most})
    assert limited.code == 3 and "File too large" in limited.error and str(tmp_path / "out") in limited.error
    scene.resume_to_the_end(tmp_path / "out", memory=memory)


@pytest.mark.case("P06")
def test_64_open_files_are_enough(strikes: Strikes, tmp_path: Path) -> None:
    """A spool of more than a hundred buckets keeps few files open, when it is resumed too."""
    gallery = make_gallery(
        tmp_path / "in", 800, make=lambda number: jpeg(number)[:2] + b"\xff\xfe\xff\xff" + bytes(65533) + jpeg(number)[2:]
    )
    sections: dict[str, Any] = {"shards": {"size": 10**7}}
    scene = Scene(gallery, {}, strikes)
    assert scene.build(tmp_path / "whole", memory=PLENTY, **sections).code == 0
    scene = replace(scene, expected=tree(tmp_path / "whole"))
    few = {"RLIMIT_NOFILE": 64}
    done = scene.build(tmp_path / "out", limits=few, **sections)
    assert done.code == 0, done.error + done.output
    assert scene.is_whole(tmp_path / "out")
    assert scene.build(tmp_path / "killed", limits=few, strike=Strike("writing", 400), **sections).code == -signal.SIGKILL
    scene.resume_to_the_end(tmp_path / "killed", limits=few, **sections)


def by_command(scene: Scene, out: Path, strike: Strike | None, *options: str, **sections: Any) -> Outcome:
    """Run a build by the command line."""
    settings = out.with_name(f"{out.name}.yaml")
    settings.write_text(json.dumps(scene.settings(out, **sections)))
    command = ["build", str(settings), *options]
    return scene.strikes.run(command=command, watched=[str(out)], strike=strike, ticking=["shardify.spool"])


@pytest.mark.parametrize(
    ("strike", "encode"),
    [(READING, {}), (WRITING, {}), (READING, {"check": "decode", "workers": 2})],
    ids=[HALF_READ, HALF_WRITTEN, "half decoded"],
)
def test_ctrl_c_leaves_a_build_that_goes_on(scene: Scene, tmp_path: Path, strike: Strike, encode: dict[str, Any]) -> None:
    """Interrupted, a build ends with 130 and says how to go on; `--resume` does."""
    out = tmp_path / "out"
    stopped = by_command(scene, out, replace(strike, how="interrupt"), encode=encode)
    assert stopped.code == 130 and stopped.struck
    assert "--resume" in stopped.output and "Traceback" not in stopped.output
    assert stopped.seconds_after < 20  # 2 are promised; a busy machine isn't a failure
    before = finished(out)
    done = by_command(scene, out, None, "--resume", encode=encode)
    assert done.code == 0, done.output
    expected = {name: data for name, data in scene.expected.items() if not encode or name.endswith((".tar", ".idx"))}
    assert tree(out).items() >= expected.items() and len(tree(out)) == len(scene.expected)
    assert before.items() <= finished(out).items()


def test_ctrl_c_before_anything_is_worth_keeping_leaves_nothing(scene: Scene, tmp_path: Path) -> None:
    """Interrupted with nothing on the disk yet, a build leaves nothing, and speaks of no `--resume`."""
    for number, strike in enumerate((Strike("looking up files"), Strike("reading", 1))):
        out = tmp_path / str(number)
        stopped = by_command(scene, out, replace(strike, how="interrupt"), memory=PLENTY)
        assert stopped.code == 130 and "--resume" not in stopped.output
        assert not out.exists()


def cut_off(scene: Scene, out: Path, strike: Strike = WRITING, **sections: Any) -> dict[str, bytes]:
    """Leave a build that was killed; return its files."""
    assert scene.build(out, strike=strike, **sections).code == -signal.SIGKILL
    return tree(out)


def change_label(root: Path) -> None:
    """Give a picture another label."""
    lines = (root / "train.csv").read_text().splitlines()
    lines[5] = lines[5].split(",")[0] + ",77"
    (root / "train.csv").write_text("\n".join(lines) + "\n")


def add_row(root: Path) -> None:
    """Name a picture that is there under a second id."""
    (root / "train/f/f/f").mkdir(parents=True, exist_ok=True)
    (root / "train/f/f/f/fff0.jpg").write_bytes(jpeg(3))
    with (root / "train.csv").open("a") as file:
        file.write("fff0,7\n")


@pytest.mark.parametrize("strike", [READING, WRITING], ids=[HALF_READ, HALF_WRITTEN])
@pytest.mark.parametrize(
    ("change", "named"), [(change_label, "source's labels"), (add_row, f"{PICTURES + 1} rows, had {PICTURES}")]
)
def test_another_table_is_refused(
    copied: Scene, tmp_path: Path, change: Callable[[Path], None], named: str, strike: Strike
) -> None:
    """A build whose table changed isn't resumed: the message says what of it did; with the old table back, it goes on."""
    table = (copied.gallery.root / "train.csv").read_bytes()
    cut_off(copied, tmp_path / "out", strike)
    change(copied.gallery.root)
    refused = copied.build(tmp_path / "out", resume=True)
    assert refused.code == 2 and named in refused.error and "--force" in refused.error
    (copied.gallery.root / "train.csv").write_bytes(table)
    copied.resume_to_the_end(tmp_path / "out")


@pytest.mark.parametrize("strike", [READING, WRITING], ids=[HALF_READ, HALF_WRITTEN])
@pytest.mark.parametrize("number", [0, PICTURES - 1])
def test_another_picture_is_refused(copied: Scene, tmp_path: Path, number: int, strike: Strike) -> None:
    """A build of which a picture changed isn't resumed, read or not yet: the message names it; with the old one back, it goes on."""
    cut_off(copied, tmp_path / "out", strike)
    path = copied.gallery.path(number)
    old, status = path.read_bytes(), path.stat()
    path.write_bytes(jpeg(1000 + number))
    refused = copied.build(tmp_path / "out", resume=True)
    assert refused.code == 2 and str(path.relative_to(copied.gallery.root)) in refused.error and "--force" in refused.error
    path.write_bytes(old)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    copied.resume_to_the_end(tmp_path / "out")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"order": {"seed": 1}}, "order.seed"),
        ({"shards": {"size": 200_000}}, "shards.size"),
        ({"encode": {"quality": 80}}, "encode.quality"),
        ({"splits": {"train": 0.7, "val": 0.3}}, "splits"),
        ({"source": {"extra": ["landmark_id"]}}, "source.extra"),
    ],
)
def test_other_settings_are_refused(scene: Scene, tmp_path: Path, sections: dict[str, Any], named: str) -> None:
    """A build whose settings decide other bytes isn't resumed: the message names the setting; with the old ones, it goes on."""
    cut_off(scene, tmp_path / "out")
    refused = scene.build(tmp_path / "out", resume=True, **sections)
    assert refused.code == 2 and named in refused.error and "--force" in refused.error
    scene.resume_to_the_end(tmp_path / "out")


def test_another_opencv_is_refused_where_it_encodes(scene: Scene, tmp_path: Path) -> None:
    """What another OpenCV encoded can't be mixed: refused with both versions; where nothing is encoded, it doesn't matter."""
    other = {"cv2.__version__": "4.0.0-other"}
    for out, encode in ((tmp_path / "encoded", {"quality": 80, "workers": 1}), (tmp_path / "kept", {})):
        cut_off(scene, out, encode=encode)
        resumed = scene.build(out, resume=True, encode=encode, constants=other)
        if encode:
            assert resumed.code == 2 and f"OpenCV is 4.0.0-other, was {cv2.__version__}" in resumed.error
        else:
            assert resumed.code == 0 and scene.is_whole(out)


@pytest.mark.parametrize("strike", [READING, WRITING], ids=[HALF_READ, HALF_WRITTEN])
def test_what_decides_no_byte_may_change(copied: Scene, tmp_path: Path, strike: Strike) -> None:
    """Another memory, another number of processes, both folders moved: a build goes on."""
    cut_off(copied, tmp_path / "out", strike)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    root = copied.gallery.root.rename(tmp_path / "other source")
    moved = replace(copied, gallery=replace(copied.gallery, root=root))
    moved.resume_to_the_end(tmp_path / "elsewhere", memory=4 * LEAST_MEMORY, encode={"workers": 2})


def test_a_spool_elsewhere(scene: Scene, tmp_path: Path) -> None:
    """With `spool` named, samples lie there meanwhile, a killed build goes on from it, and it is left as it was."""
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "mine.txt").write_text("mine")
    cut_off(scene, tmp_path / "out", READING, spool=str(spool))
    assert sum(path.stat().st_size for path in spool.rglob("*")) > LEAST_MEMORY
    scene.resume_to_the_end(tmp_path / "out", spool=str(spool))
    assert tree(spool) == {"mine.txt": b"mine"} and len(list(spool.rglob("*"))) == 1


@pytest.mark.parametrize("strike", [READING, WRITING], ids=[HALF_READ, HALF_WRITTEN])
def test_force_begins_anew(scene: Scene, tmp_path: Path, strike: Strike) -> None:
    """`--force` removes all that a journal names, shards of other sizes too; without it the message names both ways on."""
    cut_off(scene, tmp_path / "out", strike, shards={"size": 100_000})
    refused = scene.build(tmp_path / "out")
    assert refused.code == 2 and "--resume" in refused.error and "--force" in refused.error
    done = scene.build(tmp_path / "out", force=True)
    assert done.code == 0, done.error + done.output
    assert scene.is_whole(tmp_path / "out")


def test_force_that_is_killed(scene: Scene, tmp_path: Path) -> None:
    """A build that replaces a set and is killed: the old set is whole until the new one is ready to be written; then that one goes on."""
    old = tmp_path / "old"
    assert scene.build(old, order={"seed": 1}, shards={"size": 1_000_000}).code == 0
    operations = scene.build(shutil.copytree(old, tmp_path / "out"), force=True).count()
    for count in range(1, operations + 1, operations // 8):
        out = shutil.copytree(old, tmp_path / str(count))
        killed = scene.build(out, force=True, strike=Strike("", count, "any"))
        assert killed.code == -signal.SIGKILL
        if killed.phase not in {"writing", "finishing"}:
            assert tree(out).items() >= tree(old).items()
        begun = (out / ".shardify-journal").exists()
        assert begun or killed.phase in {"starting", "reading the source", "looking up files"}
        assert scene.build(out, resume=begun, force=not begun).code == 0 and scene.is_whole(out)


def test_force_removes_no_file_of_others(scene: Scene, tmp_path: Path) -> None:
    """A file that neither a manifest nor a journal names is never removed: it is named instead."""
    cut_off(scene, tmp_path / "out")
    for name in ("notes.txt", "train-000999.tar", ".hidden"):
        (tmp_path / "out" / name).write_text("mine")
        refused = scene.build(tmp_path / "out", force=True)
        assert refused.code == 2 and name in refused.error
        assert (tmp_path / "out" / name).read_text() == "mine"
        (tmp_path / "out" / name).unlink()
    scene.resume_to_the_end(tmp_path / "out")


def test_a_complete_set_is_left_as_it_is(scene: Scene, tmp_path: Path) -> None:
    """`--resume` where nothing is begins a build; on a complete set of these settings it changes nothing; of others, it refuses."""
    out = tmp_path / "out"
    assert by_command(scene, out, None, "--resume").code == 0
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    again = by_command(scene, out, None, "--resume")
    assert again.code == 0 and "nothing was changed" in again.output
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == before
    assert by_command(scene, out, None, "--resume", order={"seed": 1}).code == 2
    assert scene.is_whole(out)


def test_a_folder_of_others_is_not_resumed(scene: Scene, tmp_path: Path) -> None:
    """`--resume` into a folder with other files and no journal is refused as a build is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused = scene.build(tmp_path / "out", resume=True)
    assert refused.code == 2 and "notes.txt" in refused.error
    assert tree(tmp_path / "out") == {"notes.txt": b"mine"}


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        *(("*/.shardify-journal", damage) for damage in (cut_in_half, flip_a_byte, Path.unlink)),
        *(("*/.shardify-spool/*", damage) for damage in (cut_in_half, flip_a_byte, Path.unlink)),
        *(("*.tar", damage) for damage in (cut_in_half, Path.unlink)),  # another byte in a finished shard is what `verify` finds
        ("*.idx", Path.unlink),
    ],
)
@pytest.mark.parametrize("strike", [READING, WRITING], ids=[HALF_READ, HALF_WRITTEN])
def test_damage_is_never_packed(scene: Scene, tmp_path: Path, what: str, damage: Callable[[Path], None], strike: Strike) -> None:
    """Files that were damaged or removed after a kill: the same bytes as undisturbed, or a refusal that names what to do."""
    out = tmp_path / "out"
    cut_off(scene, out, strike)
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.match(what))
    assert files or what in {"*.tar", "*.idx"}
    for path in files[-1:]:
        damage(path)
    ended = scene.build(out, resume=True)
    if ended.code == 0:
        assert scene.is_whole(out)
        return
    assert ended.code in {2, 3} and ("--force" in ended.error or "--resume" in ended.error), ended.output
    anew = scene.build(out, force=True)  # shards that a lost part of the journal named are nobody's
    assert scene.is_whole(out) if anew.code == 0 else ("journal" in what and "remove them yourself" in anew.error)


@pytest.mark.parametrize("how", ["remove", "cut"])
def test_a_source_that_changes_meanwhile(copied: Scene, tmp_path: Path, how: str) -> None:
    """A picture that vanishes or changes between plan and read is reported by name, like a missing one; skipped where asked."""
    path = copied.gallery.path(77)
    strike = Strike("reading", how=how, path=str(path))
    whole = path.read_bytes()
    failed = copied.build(tmp_path / "out", strike=strike)
    assert failed.code == 1 and str(path.relative_to(copied.gallery.root)) in failed.error
    path.write_bytes(whole)
    skipping: dict[str, Any] = {"source": {"missing": "skip"}, "encode": {"refused": "skip"}}
    done = copied.build(tmp_path / "skipped", strike=strike, **skipping)
    assert done.code == 0, done.error
    manifest = json.loads((tmp_path / "skipped" / "train-shardindex.json").read_text())
    other = json.loads((tmp_path / "skipped" / "val-shardindex.json").read_text())
    assert copied.gallery.keys[77] in json.dumps(manifest) + json.dumps(other)


def test_a_build_that_left_out_too_much_goes_on_with_a_larger_bound(copied: Scene, tmp_path: Path) -> None:
    """What was read isn't read again; the bound decides no byte of the set."""
    copied.gallery.path(77).write_bytes(b"")
    skipping: dict[str, Any] = {"encode": {"refused": "skip"}}
    failed = copied.build(tmp_path / "out", max_skipped=0, **skipping)
    assert failed.code == 1 and "1 of " in failed.error and "max_skipped: 0 allows 0" in failed.error
    done = copied.build(tmp_path / "out", resume=True, max_skipped=1, **skipping)
    assert done.code == 0, done.error
    at_once = copied.build(tmp_path / "at-once", max_skipped=1.0, **skipping)
    assert at_once.code == 0
    names = sorted(path.name for path in (tmp_path / "at-once").glob("*.tar"))
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == [
        (tmp_path / "at-once" / name).read_bytes() for name in names
    ]


def test_two_builds_at_once(scene: Scene, tmp_path: Path) -> None:
    """`--resume` of a build that still runs is refused."""
    import fcntl

    cut_off(scene, tmp_path / "out")
    lock = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    refused = scene.build(tmp_path / "out", resume=True)
    assert refused.code == 2 and "another build" in refused.error
    os.close(lock)
    scene.resume_to_the_end(tmp_path / "out")
