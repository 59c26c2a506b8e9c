"""How object stores are asked: where, as whom, how patiently; frozen, checked at birth, silent about secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.errors import OptionsError, RemoteError
from pipeline.stores.http.address import Address
from pipeline.stores.http.options import HttpOptions, is_file_name

_PREFIXES = ("aws_", "google_", "azure_storage_", "azure_")
_OURS = {  # what obstore's settings say by these names has an option of its own, or is said by the URL
    **dict.fromkeys(("endpoint", "endpoint_url", "endpoint_url_s3", "base_url"), "give it as endpoint="),
    **dict.fromkeys(("region", "default_region"), "give it as region="),
    "skip_signature": "give it as anonymous=",
    "allow_http": "give it as allow_http=",
    **dict.fromkeys(("bucket", "bucket_name", "container", "container_name"), "the URL names it"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectOptions:
    """Options of object stores; what isn't given comes from the environment, as docs/remote.md says.

    endpoint: the URL of a store that isn't Amazon's, Google's or Microsoft's own, such as a MinIO; of Azure with the account.
    region: of S3 buckets. `anonymous`: nothing is signed, as public buckets allow. `allow_http`: for endpoints without TLS.
    config: further settings of obstore's by name, such as access_key_id and secret_access_key; never shown.
    ca: a file of certificates (PEM) to trust beside the system's (None: AWS_CA_BUNDLE).
    connect_seconds, idle_seconds, total_seconds, attempts, first_wait_seconds, longest_wait_seconds: as in HttpOptions.
    """

    endpoint: str = ""
    region: str = ""
    anonymous: bool = False
    allow_http: bool = False
    config: Mapping[str, str | bool | int] = field(default_factory=dict, repr=False)
    ca: str | None = None
    connect_seconds: float = 10.0
    idle_seconds: float = 30.0
    total_seconds: float | None = None
    attempts: int = 10
    first_wait_seconds: float = 0.25
    longest_wait_seconds: float = 30.0

    def __post_init__(self) -> None:
        self.limits()
        for name in ("anonymous", "allow_http"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(f"{name}={getattr(self, name)!r}: True or False")
        for name in ("endpoint", "region"):
            if not isinstance(getattr(self, name), str):
                raise OptionsError(f"{name} is of type {type(getattr(self, name)).__name__}: a text")
        if self.ca is not None and not is_file_name(self.ca):
            raise OptionsError(f"ca={self.ca!r}: a file of certificates, or None")
        if self.endpoint:
            endpoint_of(self.endpoint, "endpoint")
        if not isinstance(self.config, Mapping):
            raise OptionsError(f"config is of type {type(self.config).__name__}: a mapping of obstore's settings")
        object.__setattr__(self, "config", dict(self.config))  # it is sent to other processes
        for key, value in self.config.items():
            self._check_setting(key, value)

    @staticmethod
    def _check_setting(key: object, value: object) -> None:
        if not isinstance(key, str) or not isinstance(value, str | bool | int):
            raise OptionsError(f"config: a setting of type {type(value).__name__}; names and texts, numbers or booleans")
        if says := _OURS.get(plain(key)):
            raise OptionsError(f"config: {key} isn't taken from here: {says}")

    def limits(self) -> HttpOptions:
        """Return the limits of reads, as those over HTTP have them; raises OptionsError."""
        return HttpOptions(
            connect_seconds=self.connect_seconds,
            idle_seconds=self.idle_seconds,
            total_seconds=self.total_seconds,
            attempts=self.attempts,
            first_wait_seconds=self.first_wait_seconds,
            longest_wait_seconds=self.longest_wait_seconds,
        )


def plain(key: str) -> str:
    """Return a setting's name without its store's."""
    key = key.lower()
    return next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)


def endpoint_of(text: str, name: str) -> str:
    """Return an endpoint as cache names hold it; raises OptionsError for one that is none, with the `name` of where it stood."""
    address = Address(text)
    try:
        address.check()
    except RemoteError:
        raise OptionsError(f"{name} isn't a URL such as https://host:9000") from None
    if address.login or "?" in address.target:
        raise OptionsError(f"{name} holds credentials or a query; give the URL alone, and credentials by config=")
    return f"{address.scheme}://{address.authority}{address.path}".rstrip("/")
