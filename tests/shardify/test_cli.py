"""The command line: results on stdout, the rest on stderr, documented exit codes, and no traceback for an expected error."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gallery import Gallery, make_gallery, tree

from shardify import __version__
from shardify.__main__ import app

COMMANDS = ("build", "plan", "verify", "index", "info", "doctor", "sample")


@dataclass
class Result:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def shardify(*arguments: object, cwd: Path | None = None) -> Result:
    """Run the command line as its entry point does, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), chdir(cwd or Path.cwd()), pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments], prog_name="shardify")
    return Result(int(ended.value.code or 0), out.getvalue(), errors.getvalue())


def spawn(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    command = [sys.executable, "-m", "shardify", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **(pipes | options))


def write_settings(gallery: Gallery, out: Path, **sections: Any) -> Path:
    """Write a gallery's settings as YAML beside it; return the file."""
    path = gallery.root / "settings.yaml"
    path.write_text(json.dumps(gallery.config(out, **sections).model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """A source that is fine."""
    return make_gallery(tmp_path_factory.mktemp("gallery"))


@pytest.fixture
def settings(gallery: Gallery, tmp_path: Path) -> Path:
    """Its settings, packing into tmp_path/out."""
    return write_settings(gallery, tmp_path / "out")


def test_a_set_from_end_to_end(settings: Path, tmp_path: Path) -> None:
    """plan, build, verify and info agree, exit with 0, and print tables on stdout and progress as lines on stderr."""
    planned = shardify("plan", settings)
    built = shardify("build", settings)
    for result in (planned, built):
        assert result.returncode == 0, result.stderr
        assert re.search(r"^split +shards +samples +bytes$", result.stdout, re.MULTILINE)
        assert re.search(
            r"^(checking|reading|writing): 30 of 30 images, [\d,]+ images/s, [\d.]+ MB/s, ETA 0:00:00$", result.stderr, re.MULTILINE
        )
    table = built.stdout.splitlines()
    assert planned.stdout.splitlines()[: len(table)] == table
    assert "classes: 3" in planned.stdout and "types: 30 jpeg" in planned.stdout
    verified = shardify("verify", tmp_path / "out", "--decode")
    assert verified.returncode == 0
    assert verified.stdout.splitlines() == [*table, f"{tmp_path / 'out'}: fine, all of it fits its manifests"]
    assert table[1].split()[:3] == shardify("info", tmp_path / "out").stdout.splitlines()[1].split()[:3]


def test_json(settings: Path, tmp_path: Path) -> None:
    """With --json stdout is one JSON object with the splits, the problems and, of a build, the seconds of its stages."""
    built = json.loads(shardify("build", settings, "--json").stdout)
    assert set(built) == {"splits", "seconds", "problems"} and built["problems"] == []
    assert list(built["seconds"]) == ["reading the source", "looking up files", "reading", "writing", "finishing"]
    assert list(built["splits"]) == ["train", "val"]
    assert all(set(split) == {"shards", "samples", "bytes"} for split in built["splits"].values())
    assert sum(split["samples"] for split in built["splits"].values()) == 30
    planned = json.loads(shardify("plan", settings, "--json").stdout)
    assert planned["splits"] == built["splits"] and planned["types"] == {"jpeg": 30} and planned["exact"] is True
    assert json.loads(shardify("verify", tmp_path / "out", "--json").stdout) == {key: built[key] for key in ("splits", "problems")}
    described = json.loads(shardify("info", tmp_path / "out", "--json").stdout)
    assert described["splits"]["val"]["samples"] == built["splits"]["val"]["samples"] and described["problems"] == []


def test_overrides(gallery: Gallery, settings: Path, tmp_path: Path) -> None:
    """--source, --out, --seed and --set replace settings; paths there are relative to the current folder."""
    shutil.copytree(gallery.root, tmp_path / "moved")
    arguments = ("--source", "moved", "--out", "here", "--seed", 5, "--set", "shards.size=3kB", "--set", "name=other", "--json")
    result = shardify("build", settings, *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    made = json.loads((tmp_path / "here" / "train-shardindex.json").read_text())
    assert made["name"] == "other" and made["settings"]["order"]["seed"] == 5 and made["settings"]["shards"]["size"] == 3000
    assert max(shard["filesize"] for shard in made["shardlist"]) <= 3000 or min(s["nsamples"] for s in made["shardlist"]) == 1


def test_a_folder_in_use(settings: Path, tmp_path: Path) -> None:
    """A set that is there: refused with 2, left alone with 0 under --if-missing, replaced under --force."""
    assert shardify("build", settings).returncode == 0
    before = tree(tmp_path / "out")
    refused = shardify("build", settings, "--json")
    assert refused.returncode == 2 and "--force" in refused.stderr
    assert json.loads(refused.stdout)["problems"] and json.loads(refused.stdout)["splits"] == {}
    there = shardify("build", settings, "--if-missing", "--source", "nowhere")
    assert there.returncode == 0 and "is there" in there.stderr and "nothing was changed" in there.stderr
    assert shardify("build", settings, "--if-missing", "--seed", 1).returncode == 2
    assert shardify("build", settings, "--force", "--if-missing").returncode == 0
    assert tree(tmp_path / "out") == before


def test_bad_pictures(tmp_path: Path) -> None:
    """Data problems exit with 1; all are listed in JSON and in the file, the first 20 on stderr; nothing is written."""
    gallery = make_gallery(tmp_path / "in", 40, make=lambda n: b"" if n < 25 else b"\xff\xd8\xff")
    settings = write_settings(gallery, tmp_path / "out")
    result = shardify("build", settings, "--json", "--skipped", tmp_path / "skipped.csv")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    answer = json.loads(result.stdout)
    assert answer["splits"] == {} and len(answer["problems"]) == 40
    assert result.stderr.count("train/") == 20 and "... and 20 more" in result.stderr
    assert len((tmp_path / "skipped.csv").read_text().splitlines()) == 41
    planned = shardify("plan", settings, "--json")
    assert planned.returncode == 1 and sorted(json.loads(planned.stdout)["problems"]) == sorted(answer["problems"])
    assert not (tmp_path / "out").exists()
    skipping = shardify("build", settings, "--set", "encode.refused=skip")
    assert skipping.returncode == 1 and "no picture to pack" in skipping.stderr


def test_bad_tables(tmp_path: Path) -> None:
    """A table's problems come all at once, with row numbers, as JSON too."""
    gallery = make_gallery(tmp_path / "in", 3)
    (gallery.root / "train.csv").write_text("id,landmark_id\na1b,\n../x,5\na1b,7\n")
    result = shardify("plan", write_settings(gallery, tmp_path / "out"), "--json")
    problems = json.loads(result.stdout)["problems"]
    assert result.returncode == 1 and len(problems) >= 3 and all(re.match(r"train\.csv row [234]: ", line) for line in problems)


def test_verify_finds_damage(settings: Path, tmp_path: Path) -> None:
    """verify exits with 1 and prints every problem on stdout."""
    shardify("build", settings)
    (tmp_path / "out" / "val-000000.tar").unlink()
    (tmp_path / "out" / "x.tar").write_bytes(b"")
    result = shardify("verify", tmp_path / "out")
    assert result.returncode == 1 and "val-000000.tar: listed" in result.stdout and "x.tar: no manifest" in result.stdout
    assert len(json.loads(shardify("verify", tmp_path / "out", "--json").stdout)["problems"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build"], "CONFIG"),
        (["nonsense"], "nonsense"),
        (["verify", "--nonsense", "x"], "nonsense"),
        (["build", "none.yaml"], "none.yaml"),
        (["build", "SETTINGS", "--set", "shards.sise=5"], "size"),
        (["build", "SETTINGS", "--set", "encode.workers=0"], "workers"),
        (["build", "SETTINGS", "--source", "none"], "no such folder"),
        (["verify", "none"], "no such folder"),
        (["info", "none"], "no such folder"),
        (["sample", "SETTINGS"], "is a file"),
        (["sample", "x", "--count", "0"], "at least 1"),
    ],
)
def test_wrong_usage_exits_with_2(settings: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    """Wrong arguments and settings exit with 2, a message that names them, and no traceback."""
    result = shardify(*(str(settings) if a == "SETTINGS" else a for a in arguments), cwd=tmp_path)
    assert result.returncode == 2, result
    assert said in result.stderr and "Traceback" not in result.stderr and result.stdout == ""


def test_io_errors_exit_with_3(settings: Path, tmp_path: Path) -> None:
    """A disk or folder that fails exits with 3 and names the path and the cause."""
    (tmp_path / "file").write_text("x")
    result = shardify("build", settings, "--out", tmp_path / "file" / "out")
    assert result.returncode == 3 and f"{tmp_path}/file" in result.stderr and "Not a directory" in result.stderr
    result = shardify("plan", settings, "--skipped", tmp_path / "none" / "skipped.csv")
    assert result.returncode == 3 and "none/skipped.csv: No such file or directory" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.case("P07")
def test_interrupts_exit_with_130(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a lost terminal end a build within seconds: 130, what to do next, no traceback of any process; it goes on (P07)."""
    gallery = make_gallery(tmp_path / "in", 500)
    sections = {"encode": {"check": "decode", "workers": 2}, "shards": {"size": 6000}}
    ignored = signal.signal(number, signal.SIG_DFL) if number == signal.SIGHUP else None  # under nohup it would ignore that too
    process = spawn("build", write_settings(gallery, tmp_path / "out", **sections), start_new_session=True)
    if ignored is not None:
        signal.signal(number, ignored)
    os.setpriority(os.PRIO_PROCESS, process.pid, 5)  # on a busy machine it would be done before this one looks
    while process.poll() is None and len(list((tmp_path / "out").glob("*.tar"))) < 2:
        time.sleep(0.005)
    start = time.monotonic()
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert process.returncode == 130 and output == ""
    assert errors.splitlines()[-2] == "shardify: interrupted" and "Traceback" not in errors
    assert "go on with --resume" in errors.splitlines()[-1]
    assert shardify("build", gallery.root / "settings.yaml", "--resume").returncode == 0


def test_an_interrupt_that_python_drops_ends_the_work() -> None:
    """What is raised in a destructor is printed and forgotten: the next picture raises it again."""
    program = """
import signal, sys
from shardify.console import LineProgress
from shardify.interrupts import INTERRUPTS

class Ends:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

INTERRUPTS.heed()
progress = LineProgress(sys.stderr)
progress.begin("packing", 2)
progress.advance(1)
Ends()
print("dropped", flush=True)
try:
    progress.advance(1)
except KeyboardInterrupt:
    print("raised again")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["dropped", "raised again"] and "Traceback" not in done.stderr


def test_a_bar_on_a_terminal(settings: Path) -> None:
    """Where stderr is a terminal, progress is one bar with images, MB/s and ETA, and stdout stays clean."""
    main, side = pty.openpty()
    process = spawn("plan", settings, "--json", stderr=side, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"})
    os.close(side)
    shown = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:
            break
        shown += data
    os.close(main)
    assert b"30/30" in shown and b"images/s" in shown and b"MB/s" in shown and b"ETA" in shown
    assert json.loads(process.communicate()[0])["problems"] == []


def test_a_reader_that_goes_away(settings: Path, tmp_path: Path) -> None:
    """`shardify ... | head` ends without a traceback."""
    shardify("build", settings)
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn("info", tmp_path / "out", "--json", stdout=writer)
    os.close(writer)
    _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors and "Exception ignored" not in errors


def test_sample(tmp_path: Path) -> None:
    """sample draws a set, and the second time finds it there and changes nothing."""
    first = shardify("sample", tmp_path / "s", "--count", 12, "--json")
    assert first.returncode == 0 and json.loads(first.stdout)["pictures"] == 12 and json.loads(first.stdout)["fresh"] is True
    before = tree(tmp_path / "s")
    again = shardify("sample", tmp_path / "s", "--count", 12)
    assert again.returncode == 0 and "nothing was changed" in again.stdout
    assert tree(tmp_path / "s") == before and len(before) == 13


def test_version_and_help() -> None:
    """--version prints the release; --help names each command and the exit codes; each command's own help names --json."""
    assert spawn("--version").communicate(timeout=20) == (f"shardify {__version__}\n", "")
    top = shardify("--help")
    assert top.returncode == 0 and all(command in top.stdout for command in COMMANDS)
    codes = "0 fine, 1 a data problem was found, 2 usage or settings, 3 I/O or environment, 130 interrupted"
    assert codes in " ".join(top.stdout.split())
    for command in COMMANDS:
        assert "--json" in shardify(command, "--help").stdout


def test_help_loads_nothing_heavy() -> None:
    """--help imports neither numpy, pandas nor cv2, so it comes at once."""
    code = (
        "import sys, contextlib, io; from shardify.__main__ import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): app(['--help'])\n"
        "print([name for name in ('numpy', 'pandas', 'cv2', 'pydantic', 'yaml') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_is_full_costs_nothing(settings: Path, tmp_path: Path) -> None:
    """Progress and remarks that can't be written never end a build."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "shardify", "build", settings], stderr=full, stdout=subprocess.DEVNULL, check=False
        )
    assert done.returncode in (0, 120)  # 120: Python's own, where it can't flush stderr at its end
    assert shardify("verify", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("command", ["verify", "info", "index", "doctor"])
def test_commands_that_read_folders_refuse_urls(command: str) -> None:
    """The URL is named without its secrets, with what to do."""
    result = shardify(command, "s3://user:hidden@bucket/set?sig=hidden")
    assert result.returncode == 2 and "s3://...@bucket/set" in result.stderr
    assert "copy the set to a folder first" in result.stderr and "hidden" not in result.stderr + result.stdout


def test_closed_streams_cost_nothing(settings: Path, tmp_path: Path) -> None:
    """Without stdout or stderr a set is packed all the same: no file of it takes their place, and gets their lines."""
    assert shardify("build", settings, "--out", tmp_path / "whole").returncode == 0
    for closed in ("2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        out = tmp_path / "out"
        command = f"{sys.executable} -m shardify build {settings} --out {out} {closed}"
        assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
        names = sorted(path.name for path in out.glob("*.tar"))
        assert [(out / name).read_bytes() for name in names] == [
            (tmp_path / "whole" / name).read_bytes() for name in names
        ] and names
        shutil.rmtree(out)
