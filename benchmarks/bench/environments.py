"""Installs each peer into an environment of its own, with pinned versions, and knows which of them are there and why others aren't."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from programs import ENVIRONMENTS, PROGRAMS, Program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / ".venv-bench"
PIP = (
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-warn-script-location",
    "--root-user-action=ignore",
    "--no-compile",
)
TOOLS = {"squashfs": ("mksquashfs", "apt-get install squashfs-tools")}


def python(program: Program) -> Path:
    """Return the interpreter that runs a program."""
    return Path(sys.executable) if program.environment is None else HOME / program.environment / "bin" / "python"


def script(program: Program) -> Path:
    """Return the script of a program."""
    return HERE / f"with_{program.script}.py"


def absent(program: Program) -> str | None:
    """Say why a program can't run here, None where it can."""
    tool, cure = TOOLS.get(program.name, (None, ""))
    if tool is not None and shutil.which(tool) is None:
        return f"{tool} isn't here: {cure}"
    if program.environment is None:
        return None
    name = program.environment
    if stamp(name).exists() and stamp(name).read_text() == digest(name):
        return None
    why = HOME / f"{name}.failed"
    return why.read_text().strip() if why.exists() else "not installed: make bench-setup"


def stamp(name: str) -> Path:
    """Return the file that is written last."""
    return HOME / name / ".installed"


def digest(name: str) -> str:
    """Return what tells an environment's requirements from others."""
    files = [HERE / "requirements" / "common.txt", *sorted((HERE / "requirements").glob(f"{name}.*"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def set_up(names: list[str]) -> dict[str, str]:
    """Install what isn't there, of all peers or of those named; return the reasons of those that can't be."""
    known = {name: name for name in ENVIRONMENTS} | {program.name: program.environment for program in PROGRAMS.values()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{', '.join(unknown)}: no program of the benchmark; there are {', '.join(PROGRAMS)}")
    failed = {}
    for name in dict.fromkeys(known[given] for given in names) if names else ENVIRONMENTS:
        if name is None:
            continue  # it runs in the project's own
        if stamp(name).exists() and stamp(name).read_text() == digest(name):
            continue
        print(f"bench: installing {name} into {HOME.name}/{name}", file=sys.stderr, flush=True)
        why = install(name)
        note = HOME / f"{name}.failed"
        if why is None:
            note.unlink(missing_ok=True)
            stamp(name).write_text(digest(name))
        else:
            failed[name] = why
            note.write_text(why + "\n")
    return failed


def install(name: str) -> str | None:
    """Make an environment anew; return why that failed, None where its script starts."""
    home = HOME / name
    shutil.rmtree(home, ignore_errors=True)
    HOME.mkdir(exist_ok=True)
    python = home / "bin" / "python"
    requirements = HERE / "requirements" / f"{name}.txt"
    steps = [[sys.executable, "-m", "venv", home], [python, "-m", "pip", *PIP, "-r", requirements]]
    # What would bring another torch, or a CUDA build of one, goes in without its dependencies.
    if (beside := requirements.with_suffix(".no-deps.txt")).exists():
        steps.append([python, "-m", "pip", *PIP, "--no-deps", "-r", beside])
    if (build := requirements.with_suffix(".sh")).exists():
        steps.append(["bash", "-eu", build, python])
    steps.append([python, HERE / f"with_{name}.py", "--help"])
    for step in steps:
        done = subprocess.run([str(part) for part in step], capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            (HOME / f"{name}.log").write_text(f"{done.stdout}\n{done.stderr}")
            why = reason(f"{done.stdout}\n{done.stderr}") or f"exit code {done.returncode}"
            return f"can't be installed here: {why[:200]} ({HOME.name}/{name}.log)"
    return None


def reason(text: str) -> str:
    """Return the line that tells most of why an installation failed: the last that names an error, else the last."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(said) if "Error: " in line or "isn't here" in line), said[-1] if said else "")
