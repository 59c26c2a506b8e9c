"""Speaks with an object store: the door to obstore, whose errors become ours, without a secret of a URL in them.

obstore runs threads of its own, which a fork would leave behind: it is imported where a build opens its store, and the processes
that read pictures are spawned.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from shardify.config.models import Store
from shardify.config.places import SCHEMES, ObjectUrl
from shardify.errors import SettingsError, ShardifyError, StorageError

T = TypeVar("T")
Version = Mapping[str, str]  # what tells an object's versions apart: an ETag, of some stores a number too

PART_BYTES = 8 * 2**20  # of an upload: sent, signed and tried again by itself
PARTS = 4  # of one upload at once
_MOST_PARTS = 9000  # stores take 10,000
CONNECT_SECONDS = 10
REQUEST_SECONDS = 120  # a part at 70 kB/s
RETRIES = 8  # of one request, a quarter of a minute altogether
RETRY_SECONDS = 90
TRIES = 2  # of a whole upload: the library doesn't repeat a part that ran out of time
_SHA256 = "sha256"  # the metadata that says what an object holds
_ASKED_AT_ONCE = 16
_POLL_SECONDS = 0.2
_LEAST_SECRET = 6  # signs: less is a word
_SHOWN = 300  # characters of a server's message
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "specified bucket does not exist")
_UNTRUSTED = ("invalid peer certificate", "InvalidCertificate", "UnknownIssuer")
_NO_CREDENTIALS = (
    "169.254.169.254",
    "metadata.google.internal",
    "getting credentials",
    "MissingCredentials",
    "Account must be spec",
)
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY",
}


class AbsentError(StorageError):
    """There is no object of this name."""


class TakenError(StorageError):
    """An object isn't as a condition wants it: it is there already, or is another one by now."""


class UnconditionalError(StorageError):
    """The store takes no conditions."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its bytes, its sha256 in hex where its metadata says it, its version, the server's time of its writing."""

    size: int
    sha256: str
    version: Version
    written: datetime


def connect(url: ObjectUrl, settings: Store) -> Bucket:
    """Return the place in the store that `url` names. Nothing is asked of the server yet.

    Raises SettingsError where obstore is missing, `store.ca` can't be read, or settings or the environment's make no sense to it.
    """
    try:
        from obstore import store as stores  # noqa: PLC0415 - most builds do without it
    except ImportError:
        raise SettingsError(
            f"{url}: object stores need the library obstore; pip install 'shardify[cloud]' (in a clone: pip install "
            "-c constraints.txt -e '.[cloud]')"
        ) from None
    config = {"endpoint": settings.endpoint, "region": settings.region, "skip_signature": settings.anonymous or None}
    if url.scheme != "s3" and settings.region is not None:
        raise SettingsError(f"{url}: store.region is for s3:// alone; remove it")
    if url.scheme == "gs" and settings.endpoint is not None:
        raise SettingsError(f"{url}: store.endpoint is for s3:// and az:// alone; remove it")
    kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[url.scheme]
    client: dict[str, Any] = {"connect_timeout": timedelta(seconds=CONNECT_SECONDS), "timeout": timedelta(seconds=REQUEST_SECONDS)}
    if settings.allow_http:
        client["allow_http"] = True
    if settings.ca is not None:
        client["root_certificate"] = _certificates(settings.ca)
    with _naming(url, url, told=True):
        made = kind(
            url.bucket,
            config={key: value for key, value in config.items() if value is not None},
            client_options=client,
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    return Bucket(url, made)


def _certificates(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"store.ca: {path}: can't be read ({error.strerror}); name a PEM file of certificates") from None


class Bucket:
    """A prefix of a bucket, whose objects are named as files of a folder are. Methods raise StorageError or SettingsError."""

    def __init__(self, url: ObjectUrl, store: Any) -> None:
        import obstore  # noqa: PLC0415

        self.url = url
        self._store = store
        self._api: Any = obstore

    def place(self, name: str) -> str:
        """Return an object's URL."""
        return f"{self.url}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the objects right below the prefix: name -> bytes; what lies in folders below it counts as one name, with a /."""
        prefix = f"{self.url.prefix}/" if self.url.prefix else None
        with _naming(self.url, self.url):
            listed = interruptibly(lambda: self._api.list_with_delimiter(self._store, prefix))
        objects = {str(meta["path"]): int(meta["size"]) for meta in listed["objects"]}
        # A console's folder is an empty object whose name ends with a slash; it is listed without, beside what lies in it.
        found = {path.rpartition("/")[2]: size for path, size in objects.items() if path.startswith(prefix or "")}
        return found | {f"{str(path).rstrip('/').rpartition('/')[2]}/": 0 for path in listed["common_prefixes"]}

    def find(self, name: str) -> Found | None:
        """Ask for an object's facts; None where there is none."""
        try:
            with _naming(self.url, self.place(name)):
                answer = interruptibly(lambda: self._api.get(self._store, self._key(name), options={"head": True}))
        except AbsentError:
            return None
        meta = answer.meta
        return Found(int(meta["size"]), answer.attributes.get(_SHA256, ""), _version(meta), meta["last_modified"])

    def find_all(self, names: Sequence[str]) -> dict[str, Found | None]:
        """Ask for the facts of many objects, some at once; raises what the first failure is."""
        waiting, found, failures = deque(names), dict[str, Found | None](), list[BaseException]()

        def ask() -> None:
            try:
                while waiting and not failures:
                    with suppress(IndexError):  # another thread took the last one
                        name = waiting.popleft()
                        found[name] = self.find(name)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, name="ask", daemon=True) for _ in range(min(_ASKED_AT_ONCE, len(names)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return found

    def read(self, name: str) -> bytes:
        """Return a small object's bytes; raises AbsentError where there is none."""
        with _naming(self.url, self.place(name)):
            return interruptibly(lambda: bytes(self._api.get(self._store, self._key(name)).bytes()))

    def put(self, name: str, data: bytes, *, sha256: str = "", condition: str | Version = "overwrite") -> Version:
        """Write a small object in one request; return its version.

        `condition`: "create" (TakenError where there is one), or a version (TakenError where it is another by now);
        UnconditionalError where the store takes none.
        """
        options: dict[str, Any] = {"attributes": {_SHA256: sha256} if sha256 else None, "mode": condition, "use_multipart": False}
        with _naming(self.url, self.place(name)):
            made = interruptibly(lambda: self._api.put(self._store, self._key(name), data, **options))
        return _version(made)

    def put_parts(self, name: str, parts: Iterator[bytes], *, size: int, sha256: str) -> None:
        """Write a large object, which appears when all parts are there; an exception of `parts` aborts that, and leaves nothing."""
        part = max(PART_BYTES, -(-size // _MOST_PARTS))
        options: dict[str, Any] = {"attributes": {_SHA256: sha256}, "chunk_size": part, "max_concurrency": PARTS}
        with _naming(self.url, self.place(name)):
            self._api.put(self._store, self._key(name), parts, **options)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, in any order; those that aren't there are fine."""
        try:
            with _naming(self.url, self.place(names[0]) if len(names) == 1 else self.url):
                interruptibly(lambda: self._api.delete(self._store, [self._key(name) for name in names]))
        except AbsentError:
            if len(names) > 1:
                for name in names:
                    self.delete([name])

    def _key(self, name: str) -> str:
        return f"{self.url.prefix}/{name}" if self.url.prefix else name


def interruptibly(action: Callable[[], T], *, seconds: float = math.inf) -> T:
    """Do something in a thread of its own, since obstore notices no signal: Ctrl-C ends the waiting at once.

    Raises StorageError where it isn't done within `seconds`; it may go on.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(TimeoutError):
            return done.result(min(_POLL_SECONDS, max(0.0, until - time.monotonic())))
        if done.done():  # what it raised is a TimeoutError itself
            return done.result()
    raise StorageError(f"the object store didn't answer within {seconds:.0f} s; check the network and the endpoint")


def _version(facts: Mapping[str, Any]) -> Version:
    return {key: facts[key] for key in ("e_tag", "version") if facts[key] is not None}


@contextmanager
def _naming(url: ObjectUrl, place: object, *, told: bool = False) -> Iterator[None]:
    """Turn what obstore raises into an error of ours; `told`: no server was asked yet, so what it was told is wrong."""
    from obstore import exceptions  # noqa: PLC0415

    try:
        yield
    except ShardifyError:
        raise
    except (exceptions.BaseError, NotImplementedError, FileNotFoundError, ValueError) as error:
        raise _translate(error, _TOLD if told else _RULES, url, place) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # obstore's, of settings that no header can hold; no Exception
            raise
        raise SettingsError(
            f"{place}: obstore can't use what it was told: is there a line's end in a key, a token or the region, as where one was "
            "read from a file?"
        ) from None


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an error of obstore's is, by its type or a sign in its text, and what is said of it."""

    made: type[ShardifyError]
    says: str
    types: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    def fits(self, error: Exception) -> bool:
        """Tell whether it is this one's."""
        text, names = str(error), {kind.__name__ for kind in type(error).__mro__}
        return any(sign in text for sign in self.signs) or not names.isdisjoint(self.types)


_CORRECT = "{cause}; correct `store` or the environment ({environment})"
_TOLD = (_Rule(SettingsError, _CORRECT, ("Exception",)),)
_RULES = (  # the first that fits
    _Rule(
        SettingsError, "there is no {what} {bucket!r} ({cause}); make it, or choose another place (--out)", signs=_MISSING_BUCKET
    ),
    _Rule(AbsentError, "no such object ({cause}); was it removed? Begin anew with --force", ("FileNotFoundError",)),
    _Rule(
        TakenError,
        "another build wrote it meanwhile ({cause}); wait for it, or choose another place (--out)",
        ("AlreadyExistsError", "PreconditionError"),
    ),
    _Rule(
        UnconditionalError,
        "the store can't do that ({cause}); choose another place (--out)",
        ("NotImplementedError", "NotSupportedError"),
        ("501 Not Implemented",),
    ),
    _Rule(
        StorageError, "the credentials have expired ({cause}); renew them ({environment}), then --resume", signs=("ExpiredToken",)
    ),
    _Rule(
        SettingsError,
        "the server's certificate isn't trusted; if a CA of your own signed it, name that one's PEM file by store.ca",
        signs=_UNTRUSTED,
    ),
    _Rule(StorageError, "no credentials were found; set {environment}, or store.anonymous: true", signs=_NO_CREDENTIALS),
    _Rule(
        StorageError,
        "refused ({cause}); check the credentials ({environment}), and that they may list, read, write and delete there",
        ("PermissionDeniedError", "UnauthenticatedError"),
        ("status code: 401", "status code: 403"),
    ),
    _Rule(SettingsError, "the endpoint can't be used; is it http:// without store.allow_http: true?", signs=("builder error",)),
    _Rule(SettingsError, _CORRECT, types=("ValueError",)),
    _Rule(StorageError, "{cause}; check the network and the endpoint, then --resume", ("Exception",)),
)


def _translate(error: Exception, rules: Sequence[_Rule], url: ObjectUrl, place: object) -> ShardifyError:
    """Return our error for one of obstore's: what the server said, and what to do."""
    rule = next(rule for rule in rules if rule.fits(error))
    facts = {"what": SCHEMES[url.scheme], "bucket": url.bucket, "environment": _ENVIRONMENT[url.scheme]}
    return rule.made(f"{place}: {rule.says.format(cause=_cause(str(error)), **facts)}")


def _secrets() -> list[str]:
    """Return the environment's keys and tokens for object stores."""
    names = [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]
    return [os.environ[name] for name in names if re.search("KEY|TOKEN|SECRET", name) and len(os.environ[name]) >= _LEAST_SECRET]


def _cause(text: str) -> str:
    """Return what of an error of obstore's is worth reading: the server's words, else how the connection failed."""
    for secret in _secrets():  # an endpoint may repeat what it was asked
        text = text.replace(secret, "...")
    said = text.partition("\n\nDebug source")[0]
    code, message = re.search(r"<Code>([^<]*)</Code>", said), re.search(r"<Message>([^<\n]*)", said)
    if code or message:
        return ": ".join(match[1].strip() for match in (code, message) if match)[:_SHOWN]
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", said)
    tried = re.search(r" in [0-9.]+[a-zµ]*s(?:, after \d+ retries)?", said)
    kinds = re.findall(r"kind: (Timeout|Connect|Request|Decode)|(Connection refused|ConnectionReset|TimedOut|dns error)", text)
    words = dict.fromkeys("".join(kind) for kind in kinds)
    if status:
        return f"{status[1].strip()}{tried[0] if tried else ''}"
    if words:
        return f"no answer: {', '.join(words)}{tried[0] if tried else ''}"
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1?...", said.splitlines()[0] if said else "no reason given")[:_SHOWN].removeprefix(
        "Generic "
    )
