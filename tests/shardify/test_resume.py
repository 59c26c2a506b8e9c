"""Builds that are killed, lose their power or tear a write at any moment: `--resume` ends with the bytes of an undisturbed one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gallery import tree
from resuming import PICTURES, PLENTY, Scene, in_memory
from struck import Outcome, Strike, Strikes, lose_power

from shardify.config.models import LEAST_MEMORY

PLANNING = ("reading the source", "looking up files", "reading")
GROUPS = {"planning": 3, "reading": 3, "spooling": 7, "writing": 6, "between the renames": 6, "before the manifest": 5}
MEMORIES = pytest.mark.parametrize("memory", [PLENTY, LEAST_MEMORY], ids=["held", "spooled"])


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


@pytest.fixture(scope="module")
def seen(scene: Scene) -> dict[int, Outcome]:
    """What undisturbed builds do, by memory: one that holds everything, one that spools."""
    with in_memory() as folder:
        return {memory: scene.build(folder / str(memory), memory=memory) for memory in (PLENTY, LEAST_MEMORY)}


def spread(last: int, count: int) -> list[int]:
    """Return `count` numbers from 1 to `last`, evenly."""
    return [1 + (last - 1) * i // (count - 1) for i in range(count)]


def moments(group: str, scene: Scene, seen: dict[int, Outcome]) -> list[tuple[int, Strike]]:
    """Return when a build is killed, and the memory that it has."""
    spooled, shards = seen[LEAST_MEMORY], sum(name.endswith(".tar") for name in scene.expected)
    match group:
        case "planning":
            return [(LEAST_MEMORY, Strike(phase)) for phase in PLANNING]
        case "reading":
            return [(PLENTY, Strike("reading", n)) for n in spread(seen[PLENTY].phases["reading"], 3)]
        case "spooling":
            puts = [Strike("reading", n) for n in spread(spooled.phases["reading"], 4)]
            certain = spooled.count("fsync", "reading") * 3 // 4  # how many there are depends on which picture is read first
            syncs = [Strike("reading", n, "fsync") for n in spread(certain, 3)]
            return [(LEAST_MEMORY, strike) for strike in puts + syncs]
        case "writing":
            return [(memory, Strike("writing", n)) for memory in seen for n in spread(seen[memory].phases["writing"], 3)]
        case "between the renames":
            after_index = [Strike("", n, "rename", ".idx.partial", after=True) for n in spread(shards, 3)]
            before_shard = [Strike("", n, "rename", ".tar.partial") for n in spread(shards, 3)]
            return [(LEAST_MEMORY, strike) for strike in after_index + before_shard]
        case _:
            names = ("README.md.partial", "train-shardindex.json.partial", "val-shardindex.json.partial")
            before = [Strike("", 1, "rename", name) for name in names]
            after = [Strike("", 1, "rename", names[-1], after=True), Strike("finishing", 1, "unlink", "journal")]
            return [(LEAST_MEMORY, strike) for strike in before + after]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.case("S02")
def test_thirty_kills(scene: Scene, seen: dict[int, Outcome], tmp_path: Path, group: str) -> None:
    """Killed (-9) while planning, reading, spooling, writing, between the renames, before the manifest: resumed, as if undisturbed."""
    chosen = moments(group, scene, seen)
    assert len(chosen) == GROUPS[group] >= 3
    for number, (memory, strike) in enumerate(chosen):
        out = tmp_path / str(number)
        killed = scene.build(out, memory=memory, strike=strike)
        print(f"{group}: killed in the phase {killed.phase!r}, after {killed.count()} operations, by {strike}")
        assert killed.code == -signal.SIGKILL
        assert_whole(scene, out)
        scene.resume_to_the_end(out, memory=memory)


def assert_whole(scene: Scene, out: Path) -> None:
    """Check that every file under a final name is whole: shards with their index, no manifest of a part."""
    found = tree(out) if out.exists() else {}
    final = {name: data for name, data in found.items() if not name.startswith(".") and not name.endswith(".partial")}
    assert all(scene.expected[name] == data for name, data in final.items())
    assert all(name.replace(".tar", ".idx") in final for name in final if name.endswith(".tar"))
    if any(name.endswith("shardindex.json") for name in final):
        assert all(name in final for name in scene.expected if name.endswith((".tar", ".idx", ".md")))


@pytest.fixture
def restarted(tmp_path: Path) -> dict[str, str]:
    """What makes a build believe that the machine was started anew."""
    (tmp_path / "boot").write_text("another boot\n")
    return {"shardify.journal._BOOT": str(tmp_path / "boot")}


@dataclass(frozen=True)
class Death:
    """One way for a build to end: killed before its `count`-th operation of a kind, and what the disk loses by it."""

    memory: int
    operation: str
    count: int
    lost: str = ""


def deaths(seen: dict[int, Outcome], lost: str, most: int | None = None) -> Iterator[Death]:
    """Yield a death for each operation of the undisturbed builds, or for `most` of each kind.

    `lost` is "" (killed), "torn" (half of a write is there), "cut" or "zeros" (no power: see lose_power).
    """
    for memory, outcome in seen.items():
        for operation in ("write", "pwrite") if lost == "torn" else ("any",):
            last = outcome.count(operation)
            counts = range(1, last + 1) if most is None else sorted(set(spread(last, most) if last else []))
            yield from (Death(memory, operation, count, lost) for count in counts)


def die_and_resume(scene: Scene, out: Path, death: Death, restarted: dict[str, str], first: Strike | None = None) -> None:
    """Kill a build (with `first`: the resume of one that was killed there), take what the disk loses, resume, check the promises."""
    killed = [scene.build(out, memory=death.memory, strike=first)] if first else []
    how = "tear" if death.lost == "torn" else "kill"
    strike = Strike("", death.count, death.operation, how=how)
    killed.append(scene.build(out, resume=first is not None, memory=death.memory, strike=strike))
    assert {outcome.code for outcome in killed} == {-signal.SIGKILL}
    if death.lost in {"cut", "zeros"}:
        lose_power(killed, [out], death.lost)
    assert_whole(scene, out)
    scene.resume_to_the_end(out, memory=death.memory, constants=restarted if death.lost in {"cut", "zeros"} else {})
    shutil.rmtree(out)


LOST = pytest.mark.parametrize("lost", ["", "torn", "cut", "zeros"], ids=["killed", "torn", "power cut", "power zeros"])


@LOST
def test_dead_at_some_operations(
    scene: Scene, seen: dict[int, Outcome], tmp_path: Path, lost: str, restarted: dict[str, str]
) -> None:
    """As the test of every operation, for a few of them."""
    for death in deaths(seen, lost, 3):
        die_and_resume(scene, tmp_path / "out", death, restarted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MEMORIES
@LOST
def test_dead_at_every_operation(
    scene: Scene, seen: dict[int, Outcome], tmp_path: Path, memory: int, lost: str, restarted: dict[str, str]
) -> None:
    """Killed before any operation (a rename, an fsync, a removal, a write), without power too, a build goes on to the same bytes."""
    for death in deaths({memory: seen[memory]}, lost):
        die_and_resume(scene, tmp_path / "out", death, restarted)


def second_deaths(scene: Scene, folder: Path, first: Strike, lost: str, most: int) -> Iterator[Death]:
    """Yield deaths for the operations of a build that goes on where `first` killed it."""
    assert scene.build(folder / "seen", strike=first).code == -signal.SIGKILL
    yield from deaths({LEAST_MEMORY: scene.build(folder / "seen", resume=True)}, lost, most)


SECOND = [Strike("reading", PICTURES // 3), Strike("writing", PICTURES // 2)]


@pytest.mark.parametrize("lost", ["", "cut"], ids=["killed", "power cut"])
@pytest.mark.parametrize("first", SECOND, ids=["half read", "half written"])
def test_dead_a_second_time(scene: Scene, tmp_path: Path, first: Strike, lost: str, restarted: dict[str, str]) -> None:
    """As the test of many operations of a resumed build, for a few of them."""
    for death in second_deaths(scene, tmp_path, first, lost, 2):
        die_and_resume(scene, tmp_path / "out", death, restarted, first)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@LOST
@pytest.mark.parametrize("first", SECOND, ids=["half read", "half written"])
def test_dead_a_second_time_at_many_operations(
    scene: Scene, tmp_path: Path, first: Strike, lost: str, restarted: dict[str, str]
) -> None:
    """A build that was killed, resumed, and dies before one of 80 operations goes on too; what the first run left unsynced is lost with it."""
    for death in second_deaths(scene, tmp_path, first, lost, 80):
        die_and_resume(scene, tmp_path / "out", death, restarted, first)


@pytest.mark.parametrize("lost", ["cut", "zeros"], ids=["power cut", "power zeros"])
def test_power_lost_after_a_kill(scene: Scene, tmp_path: Path, lost: str, restarted: dict[str, str]) -> None:
    """What a killed run left to the page cache is lost when the resumed one loses its power: nothing vouches for it by mistake."""
    never = {"shardify.spool.SYNC_BYTES": 2**30}
    for number, pictures in enumerate((31, 37, 43)):
        out = tmp_path / str(number)
        first = scene.build(out, strike=Strike("reading", PICTURES // 3), constants=never)
        second = scene.build(out, resume=True, strike=Strike("reading", pictures))
        assert first.code == second.code == -signal.SIGKILL
        lose_power([first, second], [out], lost)
        scene.resume_to_the_end(out, constants=restarted)


def test_two_kills_in_a_row(scene: Scene, seen: dict[int, Outcome], tmp_path: Path) -> None:
    """A resumed build that is killed too is resumed again."""
    for number, (first, second) in enumerate([("reading", "reading"), ("reading", "writing"), ("writing", "writing")]):
        out = tmp_path / str(number)
        pictures = seen[LEAST_MEMORY].phases[first] // 2
        assert scene.build(out, strike=Strike(first, pictures)).code == -signal.SIGKILL
        assert scene.build(out, resume=True, strike=Strike(second, 20)).code == -signal.SIGKILL
        scene.resume_to_the_end(out)


@MEMORIES
def test_a_build_that_is_killed_again_and_again_ends(scene: Scene, seen: dict[int, Outcome], tmp_path: Path, memory: int) -> None:
    """Killed after every so many operations, a build gets on each time, and ends with the same bytes."""
    step = seen[memory].count() // 4
    for _ in range(8):
        if scene.build(tmp_path / "out", resume=True, memory=memory, strike=Strike("", step, "any")).code == 0:
            break
    assert scene.is_whole(tmp_path / "out")


@MEMORIES
def test_memory_decides_no_byte(scene: Scene, seen: dict[int, Outcome], tmp_path: Path, memory: int) -> None:
    """A build that spools and one that holds everything give the same files."""
    assert scene.build(tmp_path / "out", memory=memory).code == 0
    assert scene.is_whole(tmp_path / "out")
    spool = {
        event["path"] for event in seen[memory].events if event.get("operation") in {"pwrite", "write"} if "spool" in event["path"]
    }
    assert (len(spool) > 1) == (memory == LEAST_MEMORY)


def test_killed_while_processes_encode(scene: Scene, tmp_path: Path) -> None:
    """A build that re-encodes in two processes is killed and resumed to the bytes that one process gives."""
    resize = {"short_side": 24}
    assert scene.build(tmp_path / "whole", encode={"resize": resize, "workers": 1}).code == 0
    small = replace(scene, expected=tree(tmp_path / "whole"))
    killed = small.build(tmp_path / "out", encode={"resize": resize, "workers": 2}, strike=Strike("reading", PICTURES // 2))
    assert killed.code == -signal.SIGKILL
    small.resume_to_the_end(tmp_path / "out", encode={"resize": resize, "workers": 2})
