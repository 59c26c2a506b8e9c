"""Other systems: with what macOS lacks taken away all works, without what Windows lacks one line says so. No such machine is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nginx import NGINX, nginx
from packing import jpeg

ROOT = Path(__file__).resolve().parent.parent
WITHOUT_PROC = 'mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$@"'
EPOCHS = """
import sys
from pipeline import LoaderOptions, make_loader

if __name__ == "__main__":
    options = LoaderOptions(decode="none", keys=True, cache_dir=sys.argv[3])
    loader = make_loader(sys.argv[1], batch_size=4, num_workers=int(sys.argv[2]), shuffle=True, seed=1, options=options)
    for _ in range(2):
        print(*sorted(key for batch in loader for key in batch.keys))
"""


def elsewhere(system: str, *command: str | Path, bare: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python as on another system; `bare`: without /proc and /sys too."""
    path = os.pathsep.join((str(ROOT / "tests" / "support" / "elsewhere" / system), str(ROOT)))
    line = [sys.executable, *map(str, command)]
    if bare:
        line = ["unshare", "-m", "sh", "-c", WITHOUT_PROC, "sh", *line]
    environment = os.environ | {"PYTHONPATH": path, "NO_ALBUMENTATIONS_UPDATE": "1"}
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120, check=False)


def may_unmount() -> bool:
    """Whether a process may have a /proc of its own."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures in two class folders, and the settings that pack them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for number in range(12):
        path = folder / "in" / f"class{number % 2}" / f"p{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    (folder / "set.yaml").write_text(
        "name: t\nsource: {kind: folders, root: in}\nsplits: {train: 1.0}\nshards: {size: 8KiB, out: out}\nencode: {check: strict}\n"
    )
    (folder / "epochs.py").write_text(EPOCHS)
    return folder


def test_without_what_macos_lacks(source: Path, tmp_path: Path) -> None:
    """A set is packed to the same bytes, verified, and read whole by the trainer's process and by workers (as root without /proc)."""
    bare = may_unmount()
    here, there = tmp_path / "here", tmp_path / "there"
    arguments = ["-m", "shardify", "build", source / "set.yaml", "--out"]
    assert subprocess.run([sys.executable, *map(str, arguments), here], capture_output=True, cwd=ROOT, check=False).returncode == 0
    packed = elsewhere("macos", *arguments, there, bare=bare)
    assert packed.returncode == 0, packed.stderr
    shards = sorted(path.name for path in here.glob("*.tar"))
    assert len(shards) > 1
    assert [(there / name).read_bytes() for name in shards] == [(here / name).read_bytes() for name in shards]
    verified = elsewhere("macos", "-m", "shardify", "verify", there, bare=bare)
    assert verified.returncode == 0, verified.stderr
    for workers in ("0", "2"):
        read = elsewhere("macos", source / "epochs.py", there, workers, tmp_path / "cache", bare=bare)
        assert read.returncode == 0, read.stderr
        first, second = (line.split() for line in read.stdout.splitlines())
        assert len(set(first)) == 12 and first == second


@pytest.mark.skipif(not NGINX, reason="needs nginx")
def test_shards_of_a_server_without_what_macos_lacks(source: Path, tmp_path: Path) -> None:
    """The cache folder does without holes in files and without blocks set aside: a set that fits is fetched and read."""
    shutil.copytree(source / "in", tmp_path / "in")
    packed = elsewhere("macos", "-m", "shardify", "build", source / "set.yaml", "--out", tmp_path / "served" / "set")
    assert packed.returncode == 0, packed.stderr
    with nginx(tmp_path / "served", tmp_path / "nginx") as origin:
        url = f"{origin}/set/train-shardindex.json"
        read = elsewhere("macos", source / "epochs.py", url, "2", tmp_path / "cache")
    assert read.returncode == 0, read.stderr
    first, second = (line.split() for line in read.stdout.splitlines())
    assert len(set(first)) == 12 and first == second


def test_a_cold_disk_is_measured_under_linux_only(source: Path) -> None:
    """Without a way to put files out of the page cache `doctor` says so: it would measure memory."""
    told = elsewhere("macos", "-m", "shardify", "doctor", source / "in")
    assert told.returncode == 3
    assert "this system lets no program put files out of its page cache" in told.stderr


def test_windows_is_told_what_to_do() -> None:
    """Both packages say in one line that they need POSIX's locks, and that WSL has them."""
    command = elsewhere("windows", "-m", "shardify", "--help")
    assert (command.returncode, command.stdout) == (3, "")
    assert command.stderr.strip() == f"shardify: {sys.platform} isn't supported: it has no locks of POSIX; use WSL 2 under Windows"
    imported = elsewhere("windows", "-c", "import pipeline; pipeline.PipelineError; pipeline.make_loader")
    assert imported.returncode == 1
    assert imported.stderr.splitlines()[-1].startswith(f"ImportError: pipeline.make_loader: {sys.platform} isn't supported")
