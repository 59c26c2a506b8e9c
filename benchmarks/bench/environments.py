"""Installs each peer into an environment of its own, with pinned versions, and knows which of them are there and why others aren't.

requirements/NAME.txt says what is wanted, NAME.lock which version of each of its dependencies was tried.
"""

from __future__ import annotations

import hashlib
import os
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
TORCH, CPU_INDEX = "torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu"
TORCHVISION = "torchvision==0.28.0+cpu"


def python(program: Program) -> Path:
    """Return the interpreter that runs a program."""
    return Path(sys.executable) if program.environment is None else HOME / program.environment / "bin" / "python"


def script(program: Program) -> Path:
    """Return the script of a program."""
    return HERE / f"with_{program.script}.py"


def absent(program: Program) -> str | None:
    """Say why a program can't run here, None where it can."""
    if program.variant == "squashfs":
        if shutil.which("mksquashfs") is None:
            return "mksquashfs isn't here: apt-get install squashfs-tools"
        if os.getuid():
            return "mounting a SquashFS image needs root"
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
    pip = [python, "-m", "pip", *PIP]
    lock = ["-c", requirements.with_suffix(".lock")] if requirements.with_suffix(".lock").exists() else []
    said = _failure([sys.executable, "-m", "venv", home]) or _install_torch([*pip, *lock], requirements)
    steps = [[*pip, "-r", requirements, *lock]]
    if (build := requirements.with_suffix(".sh")).exists():
        steps.append(["bash", "-eu", build, python])
    steps.append([python, HERE / f"with_{name}.py", "--help"])
    for step in steps:
        said = said or _failure(step)
    if not said:
        return None
    (HOME / f"{name}.log").write_text(said)
    return f"can't be installed here: {reason(said)[:200]} ({HOME.name}/{name}.log)"


def _install_torch(pip: list[str | Path], requirements: Path) -> str:
    """Install torch's build for the CPU first, from where pip looks or else from PyTorch's own index; return why that failed.

    What is on PyPI under the same version is for CUDA, 4 GB in each environment.
    """
    said = _first_of([*pip, TORCH], [*pip, "--extra-index-url", CPU_INDEX, TORCH])
    if not said and "# torchvision" in requirements.read_text():
        # Where it can't be had, the one on PyPI is taken, whose operators can't be loaded: the script says what it does then.
        _first_of([*pip, "--no-deps", TORCHVISION], [*pip, "--no-deps", "--index-url", CPU_INDEX, TORCHVISION])
    return said


def _first_of(*steps: list[str | Path]) -> str:
    """Run steps until one doesn't fail; return what the last one said where all failed."""
    said = ""
    for step in steps:
        said = _failure(step)
        if not said:
            break
    return said


def _failure(step: list[str | Path]) -> str:
    """Run a step; return what it said where it failed."""
    done = subprocess.run([str(part) for part in step], capture_output=True, text=True, check=False, cwd=ROOT)
    return f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}" if done.returncode else ""


def reason(text: str) -> str:
    """Return the line that tells most of why an installation failed: the last that names an error, else the last."""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in reversed(said) if "Error: " in line or "ERROR: " in line or "isn't here" in line),
        said[-1] if said else "",
    )
