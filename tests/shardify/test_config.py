"""Settings: what a file and its overrides may say, and what an error about them says."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shardify import sources
from shardify.config import BuildConfig, load, yaml12
from shardify.config.places import ObjectUrl
from shardify.errors import SettingsError

CONFIGS = Path(__file__).parents[2] / "configs"
GOOD = """\
name: set
source: {kind: csv, root: data, table: train.csv, id: id, label: label, path: "{id}.jpg"}
splits: {train: 0.9, val: 0.1}
shards: {out: ../out}
"""


def write(folder: Path, text: str) -> Path:
    """Write a settings file into `folder`."""
    path = folder / "set.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str, **arguments: Any) -> str:
    """Return the message with which a file is refused."""
    with pytest.raises(SettingsError) as caught:
        load(write(folder, text), **arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", ["glr2020", "sample", "imagefolder", "photos"])
def test_each_file_in_configs_is_valid(name: str) -> None:
    """The files that come with the project load, and are named as their set."""
    assert load(CONFIGS / f"{name}.yaml").name == name


def test_the_photos_file_packs_a_folder_with_a_table(tmp_path: Path) -> None:
    """A table that names files is enough; a name with a dot or a blank is no key, gets one with a hash, and is kept as it is."""
    (tmp_path / "labels.csv").write_text("file,label\nIMG 001.jpg,cat\nsub/b.png,dog\n")
    items = sources.read(load(CONFIGS / "photos.yaml", source=str(tmp_path)))
    assert list(items.paths) == ["IMG 001.jpg", "sub/b.png"] and items.classes == ("cat", "dog")
    assert [key[:-17] for key in items.keys] == ["IMG_001_jpg", "sub_b_png"]
    assert [items.metadata(row) for row in range(2)] == [{"id": "IMG 001.jpg"}, {"id": "sub/b.png"}]


def test_the_glr2020_file_says_what_the_issue_fixed() -> None:
    """The names and defaults of the settings stay as they were agreed."""
    config = load(CONFIGS / "glr2020.yaml")
    assert config.byte_settings() == {
        "name": "glr2020",
        "source": {
            "kind": "csv",
            "table": "train.csv",
            "id": "id",
            "label": "landmark_id",
            "path": "train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg",
            "delimiter": ",",
            "encoding": "utf-8",
            "extra": [],
            "labels": "index",
            "split": None,
            "group": None,
            "missing": "error",
        },
        "splits": {"train": 0.98, "val": 0.02},
        "splits_seed": 0,
        "order": {"mode": "shuffle", "seed": 0},
        "encode": {"check": "header", "resize": None, "quality": None, "types": "error", "refused": "error"},
        "shards": {"size": 128 * 2**20},
    }
    assert config.source.root == Path("/data/glr2020")
    later = load(
        CONFIGS / "glr2020.yaml", sets=["encode.repair=true", "encode.pixels=1000", "source.links=anywhere"]
    ).byte_settings()
    assert (later["encode"]["repair"], later["encode"]["pixels"], later["source"]["links"]) == (True, 1000, "anywhere")
    assert "repeated" not in later["source"]  # what came later is told where it isn't at its default, so that older sets stay known
    assert config.shards.out == (CONFIGS / "../shards/glr2020").resolve()


def test_paths_in_the_file_are_relative_to_it_and_others_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each path is taken from where it was written."""
    here = tmp_path / "here"
    (tmp_path / "settings").mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    path = write(tmp_path / "settings", GOOD)
    config = load(path)
    assert (config.source.root, config.shards.out) == (tmp_path / "settings/data", tmp_path / "out")
    config = load(Path("../settings/set.yaml"))
    assert (config.source.root, config.shards.out) == (tmp_path / "settings/data", tmp_path / "out")
    config = load(path, source="pictures", out="../shards")
    assert (config.source.root, config.shards.out) == (here / "pictures", tmp_path / "shards")
    config = load(path, sets=["shards.out=there", "source={kind: folders, root: tree}"])
    assert (config.source.root, config.shards.out) == (here / "tree", here / "there")


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/shards` never makes a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load(write(tmp_path, GOOD), sets=["shards.out=~/shards"]).shards.out == tmp_path / "home/shards"


def test_overrides_replace_single_keys_and_whole_mappings(tmp_path: Path) -> None:
    """--set reaches any key, its value is YAML, and --seed is order.seed."""
    sets = ["shards.size=8MiB", "encode.resize.short_side=448", "splits={a: 0.5, b: 0.25}", "splits.c=0.25", "source.extra=[url]"]
    config = load(write(tmp_path, GOOD), seed=7, sets=sets)
    assert config.shards.size == 8 * 2**20
    assert config.encode.resize is not None
    assert (config.encode.resize.short_side, config.encode.resize.long_side) == (448, None)
    assert list(config.splits.items()) == [("a", 0.5), ("b", 0.25), ("c", 0.25)]
    assert config.order.seed == 7
    assert config.source.extra == ("url",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("134217728", 2**27),
        ("128MiB", 2**27),
        ("8MB", 8_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("2kB", 2000),
        ("1TiB", 2**40),
        ("9b", 9),
    ],
)
def test_sizes(tmp_path: Path, text: str, size: int) -> None:
    """A size is bytes or a number with its unit."""
    assert load(write(tmp_path, GOOD), sets=[f"shards.size={text}"]).shards.size == size


@pytest.mark.parametrize("text", ["8XB", "-1MB", "MiB", "1e3", "0", "-5", "true", "null", "1.5", "[1]", "0.0001B"])
def test_what_is_no_size_is_refused(tmp_path: Path, text: str) -> None:
    """A size that can't be is named with the argument that gave it."""
    assert refusal(tmp_path, GOOD, sets=[f"shards.size={text}"]).startswith(f"--set shards.size={text}: shards.size: ")


def test_all_problems_are_listed_at_once_with_their_lines(tmp_path: Path) -> None:
    """One error holds every problem: line, dotted key, what was found, the nearest name and the allowed ones."""
    text = """\
name: 5
source: {kind: csv, root: x, id: 1, lable: id, path: x}
splits: {train: 0.7, val: x, 'b c': 0.5}
order:
  mode: shufle
encode: {quality: 0, resize: {short_side: 1, long_side: 2}, check: no}
shards: {out: x, sise: 3}
ordr: {}
size: 3
1: x
"""
    lines = refusal(tmp_path, text, sets=["encode.workers=true"]).splitlines()
    file = tmp_path / "set.yaml"
    found = {line.split(": ")[1]: line for line in lines}
    assert len(lines) == len(found) == 14
    assert found["name"] == f"{file} line 1: name: must be text (put it in quotes), got 5"
    assert "put it in quotes" in found["source.id"]
    assert "is missing" in found["source.label"]
    assert found["source.lable"].startswith(f"{file} line 2: source.lable: unknown setting, did you mean 'label'?")
    assert "Allowed in source: kind, root, table, id, label, path, delimiter" in found["source.lable"]
    assert "'b c' can't name a split" in found["splits"]
    assert "can't be mixed" in found["splits"]
    assert found["order.mode"].startswith(f"{file} line 5: order.mode: got 'shufle', did you mean 'shuffle'? Allowed: shuffle")
    assert "either short_side or long_side" in found["encode.resize"]
    assert found["encode.check"] == f"{file} line 6: encode.check: got 'no'; Allowed: header, decode, strict"
    assert "must be greater than or equal to 1, got 0" in found["encode.quality"]
    assert found["encode.workers"].startswith("--set encode.workers=true: encode.workers: must be a valid integer, got True")
    assert "did you mean 'size'?" in found["shards.sise"]
    assert "did you mean 'order'?" in found["ordr"]
    assert "did you mean 'shards.size'?" in found["size"]
    assert not any("pydantic" in line or "pathlib" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n", "no mapping"),
        ("name: a\nsource: [1\n", "line 3"),
        ("name: a\nshards:\n  out: x\n  out: y\n", "line 4: the key 'out' stands twice"),
        ("name: {a: 1, a: 2}\n", "line 1: the key 'a' stands twice"),
        ("name: &n [*n]\n", "line 1: an alias to what it stands in"),
        ("name: !!python/object:os.system x\n", "line 1: could not determine a constructor"),
        ("name: a\n---\nname: b\n", "line 2: expected a single document"),
        ("name: a\x00b\n", "no YAML text"),
        ("[" * 2000, "no valid YAML"),
        ("name: !!int x\n", "no valid YAML"),
    ],
)
def test_trouble_in_the_yaml_names_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    """No YAML error reaches the user without its place, and nothing but plain data is made from YAML."""
    message = refusal(tmp_path, text)
    assert message.startswith(str(tmp_path / "set.yaml"))
    assert said in message


def test_files_that_are_none(tmp_path: Path) -> None:
    """A missing file and a folder are settings errors; bytes that aren't UTF-8 name the file."""
    with pytest.raises(SettingsError, match="no such settings file"):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(SettingsError, match="a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"latin\.yaml: no YAML text"):
        load(tmp_path / "latin.yaml")


def test_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    """`no` and `on` are names, 010 is ten, 1e-1 a number, a date a text; merge keys and anchors still work."""
    text = """\
name: 2020-01-01
source: &s {kind: folders, root: data}
splits: {no: 0.5, on: 1e-1, y: .25}
splits_seed: 010
order: {<<: {mode: source, seed: 1}, seed: 0x10}
shards: {out: out}
"""
    config = load(write(tmp_path, text))
    assert config.name == "2020-01-01"
    assert config.splits == {"no": 0.5, "on": 0.1, "y": 0.25}
    assert config.splits_seed == 10
    assert (config.order.mode, config.order.seed) == ("source", 16)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["shards"], "--set shards: no key=value"),
        (["=1"], "--set =1: no key=value"),
        (["a..b=1"], "--set a..b=1: no key=value"),
        (["name.x=1"], "--set name.x=1: name is 'set', which has no keys"),
        (["source.path={id}.jpg"], "or put the value in quotes"),
        (["shards.sice=1"], "--set shards.sice=1: shards.sice: unknown setting, did you mean 'size'?"),
        (["order=5"], "--set order=5: order: must be a mapping"),
        (["source.kind=cvs"], "--set source.kind=cvs: source.kind: got 'cvs', did you mean 'csv'? Allowed: csv, folders"),
        (["source.encoding=utf-9"], "no text encoding"),
        (["source.encoding=hex"], "no text encoding"),
        (["source.delimiter=ab"], "must be the one character"),
        (["shards.out="], "must be the path of a folder, or a URL such as s3://bucket/set, got None"),
        (['shards.out=""'], "must be the path of a folder, or a URL such as s3://bucket/set, got ''"),
        (["source.extra=url"], "source.extra"),
        (["source.extra=[a, a]"], "names a column twice"),
        (["source.extra=[id]", "source.id=key"], "can't hold a column 'id'"),
        (["source.table=null"], "source.table is missing"),
        (["source.split=part"], "splits must be texts"),
        (["splits={}"], "no split is named"),
        (["splits={train: 0.9, val: 0.2}"], "the shares sum up to 1.1, above 1"),
        (["splits={train: 0}"], "neither a share"),
        (["splits={train: true}"], "neither a share"),
        (["splits={train: .nan}"], "neither a share"),
        (["splits={train: a.csv, val: a.csv}"], "two splits name the same text"),
        (["splits={../x: 1}"], "can't name a split"),
        (["splits_seed=-1"], "greater than or equal to 0"),
        (["order.seed=9223372036854775808"], "order.seed"),
        (["order.seed=1.0"], "must be a valid integer"),
        (["encode.resize={}"], "either short_side or long_side"),
        (["encode.workers=0"], "encode.workers"),
    ],
)
def test_an_error_names_the_argument_and_the_cause(tmp_path: Path, sets: list[str], said: str) -> None:
    """What is wrong on the command line or in a value is refused with its reason."""
    assert said in refusal(tmp_path, GOOD, sets=sets)


def test_shares_that_round_to_one_are_fine(tmp_path: Path) -> None:
    """Floating point never makes ten tenths exceed the whole."""
    shares = ", ".join(f"s{i}: 0.1" for i in range(10))
    assert load(write(tmp_path, GOOD), sets=[f"splits={{{shares}}}"]).shares == (0.1,) * 10


def test_byte_settings_hold_nothing_of_this_machine(tmp_path: Path) -> None:
    """The manifest's settings are JSON, equal for two folders and process counts, and hold no absolute path."""
    sets = ["source.table=/here/train.csv", "encode.workers=2"]
    first = load(write(tmp_path, GOOD), source="/a", out="/b", sets=sets).byte_settings()
    assert first == load(write(tmp_path, GOOD), source="/c", out="/d", sets=[sets[0]]).byte_settings()
    assert json.loads(json.dumps(first)) == first
    assert first["source"]["table"] == "train.csv"
    own = load(write(tmp_path, GOOD), sets=["splits={train: /x/train.csv, val: val.csv}"])
    assert own.own_tables
    assert own.byte_settings()["splits"] == {"train": "train.csv", "val": "val.csv"}
    assert "/" not in json.dumps({**first, "source": {**first["source"], "path": ""}})


def test_whether_pictures_are_encoded_anew(tmp_path: Path) -> None:
    """resize, quality and convert re-encode, nothing else does."""
    path = write(tmp_path, GOOD)
    assert not load(path, sets=["encode.check=decode"]).encode.reencodes
    assert load(path, sets=["encode.quality=90"]).encode.reencodes
    assert load(path, sets=["encode.types=convert"]).encode.reencodes
    assert load(path, sets=["encode.resize={long_side: 9}"]).encode.reencodes


def test_settings_are_frozen() -> None:
    """Nothing changes a setting after it was checked."""
    config = load(CONFIGS / "sample.yaml")
    with pytest.raises(ValidationError):
        config.name = "other"  # type: ignore[misc]
    assert isinstance(config, BuildConfig)


@given(st.lists(st.sampled_from([*"{}[]:,#&*!|>-?%@\"'\n \t", *GOOD.split(), "\n  ", "<<", "~", "\ud800", "1e999", "0x"])))
def test_no_file_brings_another_error(pieces: list[str]) -> None:
    """Whatever a settings file holds, it is read or refused with one of our own errors."""
    with tempfile.TemporaryDirectory() as folder, suppress(SettingsError):
        path = Path(folder, "set.yaml")
        path.write_text(GOOD[: len(pieces)] + "".join(pieces) + GOOD[len(pieces) :], encoding="utf-8", errors="surrogatepass")
        load(path)


def test_an_object_store_is_an_output(tmp_path: Path) -> None:
    """A URL is taken as it stands, and decides no byte of the set; the work folder follows from it."""
    config = load(
        write(tmp_path, GOOD), out="s3://bucket/a b/c%20d/", work="w", sets=["store={region: eu-west-1, anonymous: true}"]
    )
    assert config.shards.out == ObjectUrl("s3", "bucket", "a b/c%20d") and str(config.shards.out) == "s3://bucket/a b/c%20d"
    assert (
        config.folder.parent == Path.cwd() / "w"
        and config.folder == load(write(tmp_path, GOOD), out=str(config.shards.out), work="w").folder
    )
    assert config.byte_settings() == load(write(tmp_path, GOOD)).byte_settings()
    assert BuildConfig.model_validate(config.model_dump(mode="json")) == config
    others = [load(write(tmp_path, GOOD), out=out, work="w").folder for out in ("s3://bucket/a_b/c%20d", "gs://bucket/a b/c%20d")]
    assert len({config.folder, *others}) == 3
    local = load(write(tmp_path, GOOD), work="w")
    assert local.folder == local.shards.out


def test_a_file_of_certificates_is_found_like_any_path(tmp_path: Path) -> None:
    """In the file it is relative to that, in an override to the current folder; it decides no byte of the set."""
    config = load(write(tmp_path, GOOD + "store: {ca: ca.pem}\n"))
    assert config.store.ca == tmp_path / "ca.pem"
    assert load(write(tmp_path, GOOD), sets=["store.ca=ca.pem"]).store.ca == Path.cwd() / "ca.pem"
    assert config.byte_settings() == load(write(tmp_path, GOOD)).byte_settings()
    assert BuildConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("ftp://host/x", "can't be written to by ftp://"),
        ("https://host/x?sig=hidden", "can't be written to by https://"),
        ("s3://user:hidden@bucket/x", "credentials don't belong in a URL"),
        ("s3://bucket/x?X-Amz-Signature=hidden", "has a query"),
        ("s3:///x", "names no bucket"),
        ("az://", "names no container"),
        ("s3://b/x", "names no bucket"),
        ("s3://bucket//x", "empty"),
        ("s3://bucket/../x", "'..'"),
        ("s3://bucket/" + "x" * 901, "longer"),
    ],
)
def test_urls_that_are_no_place(tmp_path: Path, out: str, said: str) -> None:
    """A URL that can't be written to is refused with what would be right; no secret of it is repeated."""
    for options in ({"out": out}, {"sets": [f"shards.out={json.dumps(out)}"]}, {"sets": [f"shards={{out: {json.dumps(out)}}}"]}):
        text = refusal(tmp_path, GOOD, **options)
        assert said in text and "hidden" not in text


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("{endpoint: 'http://nas:9000'}", "allow_http: true"),
        ("{endpoint: 'https://user:hidden@nas'}", "without credentials"),
        ("{endpoint: nas}", "must be a URL"),
        ("{secret_access_key: hidden}", "Allowed in store: endpoint, region, anonymous, allow_http"),
        ("{anonymous: 1}", "store.anonymous"),
        ("{ca: 7}", "store.ca: must be the path of a file of certificates (PEM), got 7"),
        ("{ca: ''}", "store.ca: must be the path of a file of certificates"),
        ("5", "must be a mapping"),
    ],
)
def test_how_a_store_is_reached(tmp_path: Path, store: str, said: str) -> None:
    """`store` holds no credentials, and what it holds is checked."""
    text = refusal(tmp_path, GOOD, sets=[f"store={store}"])
    assert said in text


def test_characters_beyond_16_bits_as_json_writes_them(tmp_path: Path) -> None:
    """Two halves are one character; one half alone is an error with its line."""
    data, _ = yaml12.parse('{"name": "\\ud83d\\ude00 \\u00e9"}', "c.yaml")
    assert data == {"name": "\U0001f600 é"}
    with pytest.raises(SettingsError, match=r"c\.yaml line 2: half of a character"):
        yaml12.parse('{"a": 1,\n"name": "\\ud83d"}', "c.yaml")
