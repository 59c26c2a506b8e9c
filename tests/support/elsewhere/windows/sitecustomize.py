"""Takes from Python the modules that Windows hasn't: a child that has this folder in its PYTHONPATH imports it before all else."""

import subprocess  # noqa: F401  it is imported first, as it asks for what goes
import sys

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # type: ignore[assignment]
