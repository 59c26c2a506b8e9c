"""The README: its code blocks run, its tables say what --help says, its links lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardify.config import load
from shardify.sample import SampleSet

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RUN = {"shardify": [sys.executable, "-m", "shardify"], "python": [sys.executable]}


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def shell_lines(program: str) -> list[str]:
    """Return the commands of a program in the README's shell blocks, in order."""
    return [line for block in blocks("sh") for line in block.splitlines() if line.split()[0] == program]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with this checkout's packages; it must exit with 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, drawn: SampleSet) -> Path:
    """A folder in which the README's shardify and pipeline commands have run, in their order; the sample set is there."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(drawn.folder, folder / "data" / "sample")
    for program, start in RUN.items():
        for line in shell_lines(program):
            run([*start, *shlex.split(line)[1:]], folder)
    return folder


def test_the_commands_run(workspace: Path) -> None:
    """The commands of the README leave a packed set and a contact sheet."""
    assert (workspace / "shards" / "sample" / "train-shardindex.json").exists()
    assert (workspace / "sheet.png").stat().st_size > 10_000
    assert len(shell_lines("shardify")) >= 5


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_blocks_run(workspace: Path, number: int) -> None:
    """Each Python block is a whole program that works on the packed sample set."""
    program = workspace / f"block{number}.py"
    program.write_text(blocks("python")[number])
    run([sys.executable, "-W", "error", str(program)], workspace)


def test_there_is_a_trainer() -> None:
    """The trainer is there, and short: its loop is ten lines or so."""
    trainer = blocks("python")[0]
    assert "make_loader" in trainer
    assert len([line for line in trainer.splitlines() if line.startswith("    ")]) <= 10


def test_the_settings_block_is_a_valid_file(tmp_path: Path) -> None:
    """The settings that the README shows are those of configs/glr2020.yaml."""
    (tmp_path / "configs").mkdir()
    shown = tmp_path / "configs" / "shown.yaml"
    shown.write_text(blocks("yaml")[0])
    shipped = tmp_path / "configs" / "glr2020.yaml"
    shutil.copy(ROOT / "configs" / "glr2020.yaml", shipped)
    assert load(shown) == load(shipped)


def test_make_targets_exist() -> None:
    """Every `make` target that the README names is one of the Makefile."""
    named = {word for line in shell_lines("make") for word in line.split()[1:] if "=" not in word}
    named |= set(re.findall(r"`make ([a-z-]+)", README))
    assert {"shards", "example", "test", "lint"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def help_of(command: list[str], folder: Path) -> str:
    """Return a command's --help."""
    return run([*RUN[command[0]], *command[1:], "--help"], folder).stdout


@pytest.mark.parametrize("program", ["shardify", "python -m pipeline"])
def test_the_table_names_every_command_and_option(program: str, tmp_path: Path) -> None:
    """The README's table lists the commands, and for each the options, that --help lists: no fewer, no more."""
    table = dict(re.findall(rf"^\| `{program} ([a-z]+) [A-Z]+` \|[^|]*\| (.*)\|$", README, re.MULTILINE))
    listed = help_of(program.split(), tmp_path).partition("Commands")[2]
    assert set(table) == set(re.findall(r"^│ ([a-z]+) ", listed, re.MULTILINE))
    for command, options in table.items():
        shown = help_of([*program.split(), command], tmp_path).partition("Options")[2]
        assert set(re.findall(r"--[a-z-]+", options)) == set(re.findall(r"^│ +(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}


def test_the_exit_codes_are_those_of_help(tmp_path: Path) -> None:
    """The README's exit codes are those that `shardify --help` states."""
    table = re.findall(r"^\| (\d+) \| ([^|]+) \|$", README.partition("| exit code |")[2].partition("\n\n")[0], re.MULTILINE)
    stated = " ".join(re.sub("[│╭╰]", " ", help_of(["shardify"], tmp_path)).split())
    assert f"Exit codes: {', '.join(f'{code} {meaning}' for code, meaning in table)}." in stated


def test_links_lead_to_files() -> None:
    """Every relative link of the README leads to a file or folder of the repository."""
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def programs() -> list[tuple[str, str]]:
    """Return the README's Python blocks and the examples, by name."""
    found = [(f"README block {number}", text) for number, text in enumerate(blocks("python"))]
    return found + [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.case("V07")
@pytest.mark.parametrize("name", [name for name, _ in programs()])
def test_programs_have_a_main_guard(name: str) -> None:
    """Under spawn each worker imports the program: beside imports, definitions and constants all stands behind the guard."""
    body = ast.parse(dict(programs())[name]).body
    harmless = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for node in body[:-1]:
        constant = isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert isinstance(node, harmless) or constant or docstring, ast.unparse(node)
    assert ast.unparse(body[-1]).startswith("if __name__ == '__main__':")


@pytest.mark.slow
@pytest.mark.case("V07")
def test_a_program_under_spawn(workspace: Path) -> None:
    """With workers that are spawned a program of the README runs; without its guard it ends with an error that says what to do."""
    text = next(block for block in blocks("python") if "num_workers=2" in block)
    start = "import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n"
    (workspace / "guarded.py").write_text(start + text)
    run([sys.executable, str(workspace / "guarded.py")], workspace)
    (workspace / "bare.py").write_text(start + text.replace('if __name__ == "__main__":', "if True:"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(workspace / "bare.py")]
    ended = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "behind `if __name__ == '__main__':` alone" in ended.stderr.rstrip().splitlines()[-1], ended.stderr
