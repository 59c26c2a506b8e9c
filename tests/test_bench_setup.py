"""What surrounds a benchmark: runs that leave nothing behind, environments with reasons, exit codes, and a manual that says what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "benchmarks" / "bench"
REQUIREMENTS = BENCH / "requirements"
DAEMON = "import subprocess; p = subprocess.Popen(['sleep', '1000'], start_new_session=True, env={})"


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's modules importable."""
    monkeypatch.syspath_prepend(BENCH)


@pytest.fixture
def command() -> ModuleType:
    """The benchmark's command."""
    spec = importlib.util.spec_from_file_location("bench_command", BENCH / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ended(process: int) -> bool:
    """Tell whether a process has ended, within ten seconds."""
    for _ in range(200):
        try:
            if Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_run_leaves_nothing_behind() -> None:
    """A daemon without the run's environment ends with it, and so do its folders; its last words are the reason of a failure."""
    from launch import launch

    done = launch([sys.executable, "-c", f"import os; {DAEMON}; print('{{\"pid\": %d}}' % p.pid); os._exit(0)"], patience=60)
    assert done.answer is not None and done.error is None and done.memory is None
    assert ended(done.answer["pid"])
    named = 'import json, os; print(json.dumps([os.environ["TMPDIR"], os.environ["BENCH_MEMORY"]]).join(["{\\"is\\": ", "}"]))'
    folders = launch([sys.executable, "-c", named], patience=60).answer
    assert folders is not None and not any(Path(folder).exists() for folder in folders["is"])
    failed = launch([sys.executable, "-c", "raise SystemExit('no such set')"], patience=60)
    assert failed.error == "exit code 1: no such set"
    assert launch(["true"], patience=60).error == "it printed no JSON: it said nothing"
    assert launch(["echo", "{is it}"], patience=60).error == "it printed no JSON: {is it}"


def test_a_run_that_takes_too_long_is_ended() -> None:
    """One that doesn't mind being asked to end is killed."""
    from launch import launch

    began = time.monotonic()
    late = launch(["sh", "-c", "trap '' TERM; sleep 1000 & sleep 1000"], patience=0.5)
    assert late.error == "it took longer than 0.5 s"
    assert time.monotonic() - began < 30


def test_a_run_ends_with_its_caller(tmp_path: Path) -> None:
    """Where the benchmark is killed, its program doesn't go on, and its folders are gone."""
    told = tmp_path / "told"
    shell = f"echo $$ $TMPDIR $BENCH_MEMORY > {told}.partial; mv {told}.partial {told}; exec sleep 1000"
    caller = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); from launch import launch; launch(['sh', '-c', {shell!r}], patience=900)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller])
    for _ in range(400):
        if told.exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    program, *folders = told.read_text().split()
    assert ended(int(program))
    for _ in range(200):
        if not any(Path(folder).exists() for folder in folders):
            return
        time.sleep(0.05)
    pytest.fail(f"{folders} are still there")


def test_memory_is_counted_by_kind() -> None:
    """What a program holds of its own, what lies in shared memory though nobody maps it, and what it maps of a file are told apart."""
    from launch import launch

    program = """
import mmap, os, time
own = bytearray(os.urandom(2**20)) * 60
copy = open(os.environ["BENCH_MEMORY"] + "/copy", "wb")
copy.write(bytes(40 * 2**20)); copy.flush()
file = open(os.environ["TMPDIR"] + "/file", "wb+")
file.write(bytes(20 * 2**20)); file.flush()
mapped = mmap.mmap(file.fileno(), 0)
sum(mapped[::4096])
time.sleep(1.5)
print("{}")
"""
    memory = launch([sys.executable, "-c", program], patience=60, watch=True).memory
    assert memory is not None
    assert 60 * 2**20 <= memory.own < 120 * 2**20
    # Others' shared memory may come and go meanwhile.
    assert memory.shared >= 20 * 2**20
    assert memory.files + memory.shared >= 39 * 2**20  # a temporary folder in memory is shared memory too
    assert memory.held == memory.own + memory.shared


def test_the_cpu_of_ended_children_counts() -> None:
    """What a process took is in its parent's, once that has waited for it."""
    from processes import cpu_seconds

    before = cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert cpu_seconds(os.getpid()) - before >= 0.45


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a program is left out is said: never installed, what the installation said, or what it needs beside."""
    import environments
    from programs import PROGRAMS

    monkeypatch.setattr(environments, "HOME", tmp_path)
    assert environments.absent(PROGRAMS["grain"]) == "not installed: make bench-setup"
    (tmp_path / "grain.failed").write_text("can't be installed here: no wheel\n")
    assert environments.absent(PROGRAMS["grain"]) == "can't be installed here: no wheel"
    assert environments.absent(PROGRAMS["ours"]) is None
    monkeypatch.setattr(environments.shutil, "which", lambda _: None)
    assert environments.absent(PROGRAMS["squashfs"]) == "mksquashfs isn't here: apt-get install squashfs-tools"
    monkeypatch.setattr(environments.shutil, "which", lambda name: name)
    monkeypatch.setattr(environments.os, "getuid", lambda: 1000)
    assert environments.absent(PROGRAMS["squashfs"]) == "mounting a SquashFS image needs root"


def test_an_installation_is_kept_until_its_requirements_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there isn't installed again; who failed has the reason in a note, and is tried again."""
    import environments

    said = dict.fromkeys(environments.ENVIRONMENTS, "")
    tried: list[str] = []
    monkeypatch.setattr(environments, "HOME", tmp_path)

    def install(name: str) -> str | None:
        tried.append(name)
        (tmp_path / name).mkdir(exist_ok=True)
        return said[name] or None

    monkeypatch.setattr(environments, "install", install)
    said["ray"] = "can't be installed here: no wheel"
    assert environments.set_up(["grain", "ray", "ours"]) == {"ray": said["ray"]}
    assert (tmp_path / "ray.failed").read_text() == said["ray"] + "\n"
    said["ray"] = ""
    assert environments.set_up(["grain", "ray"]) == {}
    assert tried == ["grain", "ray", "ray"]
    assert not (tmp_path / "ray.failed").exists()
    monkeypatch.setattr(environments, "digest", lambda name: f"other {name}")
    environments.set_up(["grain"])
    assert tried[-1] == "grain" and len(tried) == 4
    with pytest.raises(SystemExit, match=r"gran: no program of the benchmark; there are limit, ours"):
        environments.set_up(["gran"])


def test_torch_for_the_cpu_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for where pip looks, then at PyTorch's index; versions are those of the lock; a failure's reason is its error."""
    import environments

    steps: list[list[str]] = []
    fails = {"-c": "", "--extra-index-url": ""}

    def failure(step: list[Any]) -> str:
        words = [str(word) for word in step]
        steps.append(words)
        return "x\nERROR: No matching distribution\nhint: see above" if words[-1] == environments.TORCH and fails[words[-3]] else ""

    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setattr(environments, "_failure", failure)
    assert environments.install("grain") is None
    assert [step[-1] for step in steps[1:]] == [environments.TORCH, str(REQUIREMENTS / "grain.lock"), "--help"]
    assert all(str(REQUIREMENTS / "grain.lock") in step for step in steps[1:3])
    steps.clear()
    fails["-c"] = "no"
    assert environments.install("streaming") is None
    assert steps[2][-3:] == ["--extra-index-url", environments.CPU_INDEX, environments.TORCH]
    assert steps[3][-1] == environments.TORCHVISION
    fails["--extra-index-url"] = "no"
    why = f"can't be installed here: ERROR: No matching distribution ({tmp_path.name}/grain.log)"
    assert environments.install("grain") == why


def test_each_peer_is_pinned_with_all_that_it_brings() -> None:
    """Each environment names exact versions, and its lock has them, and torch."""
    from programs import ENVIRONMENTS

    common = pins(REQUIREMENTS / "common.txt")
    assert {"torch", "albumentations", "opencv-python-headless"} == set(common)
    for name in ENVIRONMENTS:
        lock = pins(REQUIREMENTS / f"{name}.lock")
        own = pins(REQUIREMENTS / f"{name}.txt")
        assert len(lock) >= 20
        assert own.items() | common.items() <= lock.items(), name
        assert own, name
    assert "ffcv==" in (REQUIREMENTS / "ffcv.sh").read_text()


def pins(file: Path) -> dict[str, str]:
    """Return the versions that a file of requirements names; each line must name one."""
    found = {}
    for line in file.read_text().splitlines():
        if line and not line.startswith(("#", "-r ")):
            name, equal, version = line.partition("==")
            assert equal and version, f"{file.name}: {line}"
            found[name.partition("[")[0].lower()] = version
    return found


def test_the_reason_of_a_failure_is_its_error() -> None:
    """Not pip's hint, which comes last."""
    from environments import reason

    assert reason("a\nERROR: no space\nhint: see above\n") == "ERROR: no space"
    assert reason("ImportError: no module\n") == "ImportError: no module"
    assert reason("one\ntwo\n\n") == "two"
    assert reason("") == ""


def test_what_is_there_already_is_not_written_over(command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of results from hours ago stays; the exit code is that of wrong arguments."""
    file = tmp_path / "results.json"
    file.write_text("precious")
    assert command.main(["run", str(tmp_path), "--results", str(file)]) == 2
    assert file.read_text() == "precious"
    assert "isn't written over: name another file by --results" in capsys.readouterr().err


def test_exit_codes_are_as_documented(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 with all numbers, 1 with one missing, 2 without photographs, 130 interrupted, with what was measured in the file."""
    from records import Epoch, Run

    given = ["--peers", "ours", "--places", "warm", "--work", str(tmp_path), "--quick"]
    epoch = Epoch(seconds=1, arrivals=(1,), sizes=(10,))

    def told(number: int, **ends: Any) -> int:
        class Stand:
            def __init__(self, settings: Any, results: Any, *, save: Any, say: Any) -> None:
                self.results, self.save = results, save

            def run(self) -> None:
                for error in ends.get("errors", ()):
                    known = {"place": "warm", "job": "problem", "round": 0, "program": "ours", "workers": 1}
                    self.results.runs.append(Run(**known, epochs=(epoch,), error=error))
                self.save()
                if "raises" in ends:
                    raise ends["raises"]

        monkeypatch.setattr(command, "Contest", Stand)
        monkeypatch.setattr(command, "show", lambda *_, **__: None)
        code: int = command.main(["run", str(tmp_path), *given, "--results", str(tmp_path / f"{number}.json")])
        return code

    assert told(0, errors=[None]) == 0
    assert told(1, errors=["exit code 1: no"]) == 1
    assert told(2) == 1
    assert told(3, raises=command.PhotographsError("none")) == 2
    assert told(4, errors=[None], raises=KeyboardInterrupt()) == 130
    assert len(json.loads((tmp_path / "4.json").read_text())["runs"]) == 1
    monkeypatch.setattr(command.environments, "set_up", lambda names: {"ray": "no"} if names else {})
    assert [command.main(["setup"]), command.main(["setup", "ray"])] == [0, 1]


def test_a_file_of_an_older_benchmark_is_refused(command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name, not a traceback."""
    (tmp_path / "old.json").write_text('{"machine": {}, "sets": {"a": {"seconds": 1}}, "runs": []}')
    assert command.main(["show", str(tmp_path / "old.json")]) == 2
    assert "old.json: no results of this version" in capsys.readouterr().err


def test_what_is_not_given_is_filled_in(command: ModuleType, tmp_path: Path) -> None:
    """A quick run is one cold epoch of each program's first settings; a full one has all places and jobs."""
    quick = command.settings_of(command.parse(["run", str(tmp_path), "--quick"]))
    assert (quick.count, quick.rounds, quick.epochs, quick.jobs, quick.memory) == (2000, 1, 1, ("problem",), False)
    assert len(quick.places) == 1 and quick.places[0] in ("drive", "disk")
    assert not {"question-best", "squashfs", "ram"} & set(quick.programs) and {"ours", "ray", "question"} < set(quick.programs)
    full = command.settings_of(command.parse(["run", str(tmp_path), "--disk", str(tmp_path)]))
    assert (full.count, full.rounds, full.epochs, full.places) == (9000, 5, 2, ("warm", "disk", "http"))
    assert full.jobs == ("problem", "crop", "bytes") and full.memory and full.home == full.work / "drive"


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_numbers_are_above_zero(command: ModuleType, number: str) -> None:
    """No rounds are no benchmark."""
    with pytest.raises(SystemExit) as error:
        command.parse(["run", "photos", f"--rounds={number}"])
    assert error.value.code == 2


def test_the_manual_names_what_is_there(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option, program and place of the help is in docs/benchmark.md, and nothing else; its commands can be parsed."""
    from programs import PROGRAMS
    from tables import PLACES

    manual = (ROOT / "docs" / "benchmark.md").read_text()
    with pytest.raises(SystemExit):
        command.parse(["run", "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert set(re.findall(r"`(--[a-z][a-z-]+)`", manual)) == options
    programs = re.findall(r"^\| `([a-z0-9-]+)` \|", manual, re.MULTILINE)
    assert set(programs) == set(PROGRAMS) and len(programs) == len(set(programs))
    assert set(re.findall(r"^\| ([a-z]+) \|", manual, re.MULTILINE)) - {"place", "program"} == set(PLACES)
    lines = re.findall(r"^ {4}python benchmarks/bench (.*?)(?: +#.*)?$", manual, re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        command.parse(shlex.split(line))
