"""Which settings a build has and which values they may take, as frozen pydantic models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    model_validator,
)

from shardify.config.places import ObjectUrl, is_url, work_folder
from shardify.format.names import is_split
from shardify.format.picture import PIXEL_LIMIT

_LATER = (("source", "repeated"), ("source", "links"), ("encode", "repair"), ("encode", "pixels"))
SHARE_TOLERANCE = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1 in floating point, other sums a little more
LEAST_MEMORY = 2**20  # below a few pictures' size nothing is gained, and every sample is a bucket of its own
_UNITS = {"": 1, "B": 1} | {f"{p}{b}": s**n for n, p in enumerate("KMGT", 1) for b, s in (("B", 1000), ("IB", 1024))}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) *([A-Za-z]*)")


def _bytes(value: object) -> object:
    """Turn "128MiB", "8MB" or "1.5 GiB" into bytes; anything but text is left to the type's own check."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError("no size; write bytes (134217728) or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _split_value(value: object) -> float | str:
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise ValueError("neither a share above 0 and up to 1 nor a text (a table, a folder or a value of source.split)")


def _kinds(splits: Mapping[str, float | str]) -> tuple[dict[str, float], dict[str, str]]:
    shares = {name: value for name, value in splits.items() if isinstance(value, float)}
    return shares, {name: value for name, value in splits.items() if isinstance(value, str)}


def _splits(splits: dict[str, float | str]) -> dict[str, float | str]:
    """Check the splits against each other: names, one kind of value, shares that fit in 1, no text twice."""
    wrong = [f"{name!r} can't name a split (letters, digits, _ and -, at most 60)" for name in splits if not is_split(name)]
    shares, texts = _kinds(splits)
    if not splits:
        wrong.append("no split is named; write for example {train: 0.9, val: 0.1}")
    if shares and texts:
        wrong.append(f"shares ({', '.join(shares)}) and texts ({', '.join(texts)}) can't be mixed; make all of one kind")
    elif (total := math.fsum(shares.values())) > 1 + SHARE_TOLERANCE:
        wrong.append(f"the shares sum up to {total:.6g}, above 1; make them smaller")
    if len(set(texts.values())) < len(texts):
        wrong.append("two splits name the same text; each needs its own")
    if wrong:
        raise ValueError("; ".join(wrong))
    return splits


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("must be one line of printable text")
    return text


def _delimiter(text: str) -> str:
    if len(text) != 1 or text in '"\r\n\0':
        raise ValueError("must be the one character that separates columns, such as ',', ';' or \"\\t\"")
    return text


def _encoding(text: str) -> str:
    try:
        "".encode(text)
    except (LookupError, ValueError) as error:
        raise ValueError("no text encoding that Python knows; for example utf-8, utf-16, latin-1, cp1252") from error
    return text


def _folder(value: object) -> object:
    if isinstance(value, str) and (not value or "\0" in value):
        raise ValueError("must be the path of a folder")
    return value


def _certificates(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be the path of a file of certificates (PEM)")
    return value


def _out(value: object) -> Path | ObjectUrl:
    """Return the folder or the place in an object store that a set goes to."""
    if isinstance(value, Path | ObjectUrl):
        return value
    if isinstance(value, str) and is_url(value):
        return ObjectUrl.parse(value)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be the path of a folder, or a URL such as s3://bucket/set")
    return Path(value)


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^?#@\s]*)?", text):
        raise ValueError("must be a URL such as https://minio.lan:9000, without credentials and query")
    return text.rstrip("/")


Size = Annotated[int, BeforeValidator(_bytes), Field(gt=0, lt=2**63)]
Line = Annotated[str, AfterValidator(_line)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Folder = Annotated[Path, Field(strict=False), BeforeValidator(_folder)]
Certificates = Annotated[Path, Field(strict=False), BeforeValidator(_certificates)]
Out = Annotated[Path | ObjectUrl, PlainValidator(_out), PlainSerializer(str, when_used="json")]
Splits = Annotated[dict[str, Annotated[float | str, PlainValidator(_split_value)]], AfterValidator(_splits)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CsvSource(_Settings):
    """A table of pictures: each row has an id, a label and the columns that its path is made of.

    `table` is relative to `root`; splits that name tables of their own take its place. `split` is the column whose values name
    the splits. `extra` are the columns that go into the samples' json. `group` is the column whose equal values stay in one split.
    `repeated`: several rows that name one file. `links`: whether a link may lead out of `root`.
    """

    kind: Literal["csv"]
    root: Folder
    table: Line | None = None
    id: Line
    label: Line
    path: Line
    delimiter: Annotated[str, AfterValidator(_delimiter)] = ","
    encoding: Annotated[str, AfterValidator(_encoding)] = "utf-8"
    extra: tuple[Line, ...] = Field(default=(), strict=False)
    labels: Literal["index", "as_is"] = "index"
    split: Line | None = None
    group: Line | None = None
    repeated: Literal["error", "keep"] = "error"
    links: Literal["within", "anywhere"] = "within"
    missing: Literal["error", "skip"] = "error"

    @model_validator(mode="after")
    def _check_extra(self) -> CsvSource:
        if len(set(self.extra)) < len(self.extra):
            raise ValueError(f"extra names a column twice: {', '.join(self.extra)}; name each once")
        if "id" in self.extra and self.id != "id":
            raise ValueError(
                "extra can't hold a column 'id' that isn't source.id: a sample's json has its id there; rename the column"
            )
        return self


class FoldersSource(_Settings):
    """A tree of class folders, `root/<class>/**/*`; where splits are texts, `root/<text>/<class>/**/*`.

    `links`: whether a link may lead out of `root`, and to a folder.
    """

    kind: Literal["folders"]
    root: Folder
    labels: Literal["index", "as_is"] = "index"
    links: Literal["within", "anywhere"] = "within"
    missing: Literal["error", "skip"] = "error"


class Order(_Settings):
    """The order of the samples: by a keyed hash, by hash with every class spread evenly, or as the source has them."""

    mode: Literal["shuffle", "stratified", "source"] = "shuffle"
    seed: Seed = 0


class Resize(_Settings):
    """The length in pixels to which one side is shrunk; smaller pictures stay as they are."""

    short_side: Annotated[int, Field(ge=1, le=65535)] | None = None
    long_side: Annotated[int, Field(ge=1, le=65535)] | None = None

    @model_validator(mode="after")
    def _check_sides(self) -> Resize:
        if (self.short_side is None) == (self.long_side is None):
            raise ValueError("needs either short_side or long_side; write null to leave the pictures as they are")
        return self


class Encode(_Settings):
    """How pictures are checked and, where asked, mended and re-encoded; what happens to a refused one.

    `check`: the header and the end mark, or that it decodes, or that it does so without a complaint. `repair` puts back a JPEG's
    end mark where nothing else is missing. `pixels` is how many a picture may have; decoded it takes 3 bytes for each. `workers:
    null` means one process for each CPU where pictures are decoded, else none but the main one.
    """

    check: Literal["header", "decode", "strict"] = "header"
    repair: bool = False
    pixels: Annotated[int, Field(ge=1, le=2**30)] = PIXEL_LIMIT  # cv2 decodes no more than 2^30
    resize: Resize | None = None
    quality: Annotated[int, Field(ge=1, le=100)] | None = None
    types: Literal["error", "keep", "convert"] = "error"
    refused: Literal["error", "skip"] = "error"
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None

    @property
    def reencodes(self) -> bool:
        """Whether pictures are encoded anew (all of them with `quality`, else those that are too large or of another type)."""
        return self.resize is not None or self.quality is not None or self.types == "convert"


class Shards(_Settings):
    """How large shards may get, in bytes as written, and the folder or the place in an object store that they go to."""

    size: Size = 128 * 2**20
    out: Out


class Store(_Settings):
    """How an object store is reached; what is null is taken from the environment (AWS_..., GOOGLE_..., AZURE_...).

    Credentials have no place here: they come from the environment alone. `ca`: certificates that are trusted beside the system's.
    """

    endpoint: Annotated[Line, AfterValidator(_endpoint)] | None = None
    region: Line | None = None
    anonymous: bool = False
    allow_http: bool = False
    ca: Certificates | None = None

    @model_validator(mode="after")
    def _check_http(self) -> Store:
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.allow_http:
            raise ValueError("endpoint is http://, which sends all in the clear; write allow_http: true if that is right")
        return self


class BuildConfig(_Settings):
    """All settings of a build; `splits` keeps the order of the file.

    `memory` is how many bytes of samples are held at once (null: a quarter of what is available, at most 4 GiB); what doesn't fit
    lies in the folder `spool` meanwhile (null: in the output folder). A set for an object store is made in a folder below `work`
    (null: in the user's cache), whose shards go as they are uploaded. None of them decides a byte of the set. `max_skipped` is how
    many pictures `missing: skip` and `refused: skip` may leave out: a count, or with a point (0.01) a share of the rows.
    """

    name: Annotated[Line, Field(max_length=100)]
    source: Annotated[CsvSource | FoldersSource, Field(discriminator="kind")]
    splits: Splits
    splits_seed: Seed = 0
    order: Order = Order()
    encode: Encode = Encode()
    max_skipped: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0.01
    shards: Shards
    memory: Annotated[Size, Field(ge=LEAST_MEMORY)] | None = None
    spool: Folder | None = None
    work: Folder | None = None
    store: Store = Store()

    @model_validator(mode="after")
    def _check_splits(self) -> BuildConfig:
        if isinstance(self.source, CsvSource):
            by_column = self.source.split is not None
            if by_column and self.shares:
                raise ValueError("splits must be texts (values of that column), not shares, where source.split names a column")
            if self.source.table is None and (by_column or self.shares):
                raise ValueError("source.table is missing; name the table under source.root")
        return self

    @property
    def folder(self) -> Path:
        """The folder that the set is made in: `shards.out`, or where that is an object store one of the build's own."""
        out = self.shards.out
        return work_folder(out, self.work) if isinstance(out, ObjectUrl) else out

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The splits' shares in their order, or None where the splits are texts."""
        return tuple(_kinds(self.splits)[0].values()) or None

    @property
    def own_tables(self) -> bool:
        """Whether each split is a table (or, of class folders, a folder) of its own."""
        return self.shares is None and getattr(self.source, "split", None) is None

    def byte_settings(self) -> dict[str, Any]:
        """Return what decides the output's bytes, ready for JSON: no folder of this machine, no count of processes.

        A setting that came later isn't there at its default: what was packed before is still a set of these settings.
        """
        here: Any = {"source": {"root"}, "encode": {"workers"}, "shards": {"out"}}
        here |= dict.fromkeys(("memory", "spool", "work", "store", "max_skipped"), True)
        settings = self.model_dump(mode="json", exclude=here)
        for section, name in _LATER:
            default = type(getattr(self, section)).model_fields.get(name)
            if default is not None and settings[section][name] == default.default:
                del settings[section][name]
        if "table" in settings["source"]:
            settings["source"]["table"] = None if self.own_tables else _portable(settings["source"]["table"])
        if self.own_tables:
            settings["splits"] = {name: _portable(value) for name, value in settings["splits"].items()}
        return settings


def _portable(path: str) -> str:
    return PurePath(path).name if PurePath(path).is_absolute() else path
