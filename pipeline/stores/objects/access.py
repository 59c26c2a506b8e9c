"""Settles where a store is asked and as whom: options first, then the environment's standard places, then AWS profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pipeline.errors import OptionsError
from pipeline.stores.objects.options import ObjectOptions, endpoint_of, plain
from pipeline.stores.objects.profile import Profile, profile

# By kind of store: the variables that give an endpoint, the first that is set; obstore's names for it, all of which are given.
_ENDPOINTS: Final = {
    "s3": (("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), ("endpoint", "aws_endpoint_url_s3")),
    "gs": (("GOOGLE_BASE_URL",), ("base_url",)),
    "az": (("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"), ("endpoint",)),
}
_ALLOW_HTTP: Final = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
_ACCOUNTS: Final = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Where one of these is set, obstore finds the keys by it.
_OTHER_KEYS: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_KEYS: Final = {"access_key_id", "secret_access_key", "session_token", "token"}
_FOR_EVER = timedelta(days=365)  # obstore's default ends each request after 30 s, however well its bytes come


@dataclass(frozen=True, slots=True)
class Access:
    """What obstore is told: its settings (secrets among them) and its client's; `place`: the endpoint or account, for names."""

    place: str
    config: dict[str, Any] = field(repr=False)
    client: dict[str, Any] = field(repr=False)


def access(kind: str, options: ObjectOptions, environ: Mapping[str, str]) -> Access:
    """Return how stores of a kind (s3, gs, az) are reached; raises OptionsError for what can't be used."""
    config: dict[str, Any] = dict(options.config)
    own = _own_profile(options, environ) if kind == "s3" else Profile()
    if own.key:
        config |= {"access_key_id": own.key, "secret_access_key": own.secret}
        config |= {"session_token": own.token} if own.token else {}
    if options.anonymous:
        config["skip_signature"] = True
    if kind == "s3" and (region := options.region or (own.region if not any(map(environ.get, _REGIONS)) else "")):
        config["region"] = region
    place = _endpoint(kind, options, environ, own)
    config |= dict.fromkeys(_ENDPOINTS[kind][1], place) if place else {}
    if kind == "az" and not place:
        account = next((str(value) for key, value in config.items() if plain(key) == "account_name"), "")
        account = account or next(filter(None, map(environ.get, _ACCOUNTS)), "")
        config |= {"account_name": account} if account else {}  # obstore doesn't know all of its variables
        place = f"https://{account.lower()}.blob.core.windows.net" if account else ""
    return Access(place, config, _client(kind, place, options, environ))


def _own_profile(options: ObjectOptions, environ: Mapping[str, str]) -> Profile:
    """Return what the AWS tools' files say, of keys only where no others are given."""
    given = options.anonymous or any(plain(key) in _KEYS for key in options.config)
    return profile(environ, keys=not (given or environ.get("AWS_ACCESS_KEY_ID") or any(map(environ.get, _OTHER_KEYS))))


def _endpoint(kind: str, options: ObjectOptions, environ: Mapping[str, str], own: Profile) -> str:
    variable = next((name for name in _ENDPOINTS[kind][0] if environ.get(name)), "")
    if options.endpoint:
        return endpoint_of(options.endpoint, "endpoint")
    if variable:
        return endpoint_of(environ[variable], variable)
    return endpoint_of(own.endpoint, "endpoint_url in ~/.aws/config") if own.endpoint else ""


def _client(kind: str, place: str, options: ObjectOptions, environ: Mapping[str, str]) -> dict[str, Any]:
    allowed = options.allow_http or environ.get(_ALLOW_HTTP[kind], "").lower() in ("1", "true", "yes", "on")
    if place.startswith("http://") and not allowed:
        raise OptionsError(
            f"{place}: an endpoint without TLS: what is read can be seen and changed on the way; if that is meant, give "
            "ObjectOptions(allow_http=True)"
        )
    limits = options.limits()
    client: dict[str, Any] = {
        "allow_http": allowed,
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
        "read_timeout": timedelta(seconds=limits.idle_seconds),
        "timeout": _FOR_EVER if limits.total_seconds is None else timedelta(seconds=limits.total_seconds),
    }
    trust = options.ca or (environ.get("AWS_CA_BUNDLE", "") if kind == "s3" else "")
    if trust:
        try:
            client["root_certificate"] = Path(trust).read_bytes()
        except OSError as error:
            raise OptionsError(f"{trust}: these certificates can't be read ({error.strerror}); name a PEM file by ca=") from None
    return client
