"""What docs/SECURITY.md promises is held by tests: each that it names is there, and here are those that belong to no other file."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gallery import make_gallery
from packing import pack, write_tar
from residence import within_memory
from resuming import large

import pipeline
from pipeline.errors import OptionsError, PipelineError
from pipeline.items import Wanted
from pipeline.samples import ShardFile, ShardReader
from pipeline.survey import survey
from pipeline.urls import resolve
from shardify.config import load
from shardify.errors import SettingsError, ShardifyError
from shardify.format import manifest, tar
from shardify.format.manifest import ShardEntry
from shardify.journal import Journal, Record
from shardify.sinks import FolderSink
from shardify.sources import template

ROOT = Path(__file__).resolve().parent.parent
TEXT = "id,label\na,1\n"


def test_each_promise_names_tests_that_are_there() -> None:
    """Every row of the page has a test, and every test that it names is defined once or more."""
    page = (ROOT / "docs" / "SECURITY.md").read_text()
    rows = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")][2:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 10 and all(named)
    defined = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    assert [name for names in named for name in names if f"def {name}(" not in defined] == []


@pytest.mark.case("V05")
def test_no_program_is_run_by_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a shell would run are names: of tars, of pictures in a table, of an output folder."""
    ran = tmp_path / "ran"
    name = f"$(touch {ran.name});`touch {ran.name}`|touch {ran.name} #.tar"
    monkeypatch.chdir(tmp_path)
    made = pack(tmp_path / "set", 4, 1)
    (tmp_path / name).write_bytes(next(iter(sorted(made.folder.glob("*.tar")))).read_bytes())
    with pipeline.make_loader([f"./{name}"], batch_size=2, num_workers=0) as loader:
        assert sum(len(batch.labels) for batch in loader) == 4
    gallery = make_gallery(tmp_path / "in $(touch ran)", 4)
    out = tmp_path / "`touch ran`"
    config = gallery.config(out, splits={"train": 1.0}).model_dump(mode="json")
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "shardify", "build", str(tmp_path / "c.yaml")], check=True, cwd=ROOT, capture_output=True)
    assert list(out.glob("*.tar")) and not ran.exists() and not (ROOT / "ran").exists()


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system", "!!python/object/new:os.system []", "!x {}"],
)
def test_settings_make_no_objects(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML's tags for Python's objects are errors of the file, in settings and in a preview's transform."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(f"name: {text}\n")
    with pytest.raises(SettingsError):
        load(tmp_path / "c.yaml")
    from pipeline.__main__ import _load

    (tmp_path / "t.yaml").write_text(f"- {text}\n")
    with pytest.raises(OptionsError):
        _load(tmp_path / "t.yaml")
    for other in ("- os.system: {command: touch ran}\n", "- __import__: {name: os}\n", "- Compose.__init__: {}\n"):
        (tmp_path / "t.yaml").write_text(other)
        with pytest.raises(OptionsError):
            _load(tmp_path / "t.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{id.__class__}", "{id!r:>9}", "{0}", "{id[a]}", "{id[0][0]}", "{id:%s}"])
def test_a_template_reaches_into_nothing(text: str) -> None:
    """What Python's format language would follow or compute is an error, or a column of that very name."""
    try:
        parsed = template.parse(text)
    except SettingsError:
        return
    assert [part.column for part in parsed.parts] == [text.strip("{}")] and parsed.parts[0].index is None


def test_a_members_name_is_no_path(tmp_path: Path) -> None:
    """Members named like files outside are keys; nothing appears anywhere, whatever reads them."""
    data = next(iter(pack(tmp_path / "set", 1, 1).pictures.values()))
    odd = ["../../escaped", "/etc/escaped", "..", "a/../../escaped"]
    (tmp_path / "odd").mkdir()
    write_tar(tmp_path / "odd" / "a.tar", [(key, [("jpg", data), ("cls", b"0")]) for key in odd])
    before = sorted(tmp_path.rglob("*"))
    reader = ShardReader([ShardFile(str(tmp_path / "odd" / "a.tar"), 3, 0)], Wanted(("jpg",), "cls"))
    try:
        # ".." is no key with a field: its first dot ends an empty one.
        assert [reader.read(0, at)["__key__"] for at in range(3)] == [key for key in odd if key != ".."]
    finally:
        reader.close()
    assert sorted(tmp_path.rglob("*")) == before and not Path("/etc/escaped").exists()


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "/victim", "..", ""])
def test_a_journal_removes_nothing_outside(tmp_path: Path, name: str) -> None:
    """A journal that names files elsewhere is refused under --force, and they stay."""
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    header = Record("build", {"spool": ".shardify-spool", "place": (tmp_path / "out").stat().st_ino, "replaces": []})
    journal = Journal.create(tmp_path / "out" / ".shardify-journal", header)
    name = str(victim) if name == "/victim" else name
    journal.append(Record("clear", {"remove": [name], "shards": {}}), durable=True)
    journal.close()
    with pytest.raises(SettingsError, match="isn't in its folder"), FolderSink(tmp_path / "out", ["train"], force=True) as sink:
        sink.begin(tmp_path / "out" / ".shardify-spool")
    assert victim.read_text() == "mine"


def claims(folder: Path) -> Iterator[Path]:
    """Yield what to point at: sets whose manifest, index or tar claims more than there is."""
    made = pack(folder / "set", 4, 1)
    shard = next(iter(sorted(made.folder.glob("*.tar"))))
    index, told = shard.with_suffix(".idx"), next(iter(made.folder.glob("*-shardindex.json")))
    good = index.read_text()
    index.write_text(good.replace(good.split()[4], "9" * 15, 1))
    yield told
    huge = good.replace(good.split()[3], "1", 1)
    index.write_text(huge.replace(huge.split()[4], str(2**40), 1))
    yield told
    index.write_text("v1.2 99999999999\n")
    yield shard
    index.unlink()
    for samples, size in ((2**39, 0), (10**6, shard.stat().st_size), (4, 2**52)):
        told.write_bytes(manifest.dump(manifest.Manifest("n", "train", (ShardEntry(shard.name, samples, size, ""),))))
        yield told


def test_what_is_claimed_takes_no_memory(tmp_path: Path) -> None:
    """Counts and sizes that can't be true are our own errors, before room is made for them."""
    for path in claims(tmp_path):
        with within_memory(64 * 2**20), pytest.raises((PipelineError, ShardifyError)):
            survey(resolve(str(path)))
            with pipeline.make_loader(str(path), batch_size=2, num_workers=0) as loader:
                list(loader)
    block = tar.header("a.jpg", 8 * 2**30 - 1)
    with pytest.raises(ShardifyError):
        list(tar.members(io.BytesIO(block + bytes(1024)), 1536))


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_files_are_not_for_all_to_write(tmp_path: Path) -> None:
    """Even where the umask allows everything: shards, indexes, manifests, journal, folders; spool and cache are their user's alone."""
    gallery = make_gallery(tmp_path / "in", 60, make=large)
    config = gallery.config(tmp_path / "out", memory=2**20, shards={"size": 300_000}).model_dump(mode="json")
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_ALBUMENTATIONS_UPDATE": "1"}
    program = (
        "import os, sys; os.umask(0)\n"
        "from shardify import build; from shardify.config import load; from pathlib import Path; import pipeline\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'support')!r}); from gallery import Silent\n"
        "seen, spools = [], []\n"
        "real = build._write_shard\n"
        "def note(job, work, sink, name, slots):\n"
        "    seen.extend(p for p in (sink.folder, *sink.folder.rglob('*')) if p.stat().st_mode & 0o002)\n"
        "    spools.extend(p for p in sink.folder.rglob('*') if p.is_dir())\n"
        "    seen.extend(p for p in spools if p.exists() and p.stat().st_mode & 0o077)\n"
        "    return real(job, work, sink, name, slots)\n"
        "build._write_shard = note\n"
        f"build.build(load(Path({str(tmp_path / 'c.yaml')!r})), force=False, skipped_to=None, progress=Silent())\n"
        f"tar = sorted(Path({str(tmp_path / 'out')!r}).glob('train-*.tar'))[0]\n"
        f"Path({str(tmp_path / 'bare.tar')!r}).write_bytes(tar.read_bytes())\n"
        f"os.utime({str(tmp_path / 'bare.tar')!r}, (1e9, 1e9))\n"  # what may still change isn't remembered
        f"loader = pipeline.make_loader({str(tmp_path / 'bare.tar')!r}, batch_size=1, num_workers=0)\n"
        "[None for _ in loader]; loader.close(); assert spools; print(seen)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    made = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert len(made) > 5 and not [path.name for path in made if path.stat().st_mode & stat.S_IWOTH]
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()]
    assert cached and not [path for path in cached if path.stat().st_mode & 0o077]
