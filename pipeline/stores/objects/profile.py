"""Reads the profile that the AWS tools' files hold: keys, region and endpoint; roles and logins aren't followed."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import OptionsError


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile says, "" for what it doesn't."""

    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    region: str = ""
    endpoint: str = ""


def profile(environ: Mapping[str, str], *, keys: bool) -> Profile:
    """Return AWS_PROFILE, or the default one where that isn't set, with its keys if they are wanted.

    Raises OptionsError for a profile that is named and isn't there, or has no keys.
    """
    named = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or ""
    name = named or "default"
    kept = _section(environ, "AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", (name,))
    more = _section(environ, "AWS_CONFIG_FILE", "~/.aws/config", (f"profile {name}", name) if name != "default" else (name,))
    said = more | kept
    if not keys:
        return Profile(region=said.get("region", ""), endpoint=said.get("endpoint_url", ""))
    if named and not said:
        raise OptionsError(
            f"AWS_PROFILE={named}: neither ~/.aws/credentials nor ~/.aws/config has it; correct the name, or unset it"
        )
    found = Profile(
        said.get("aws_access_key_id", ""),
        said.get("aws_secret_access_key", ""),
        said.get("aws_session_token", ""),
        said.get("region", ""),
        said.get("endpoint_url", ""),
    )
    if named and not (found.key and found.secret):
        raise OptionsError(
            f"AWS_PROFILE={named}: has no keys of its own (logins and roles aren't followed); run "
            f'eval "$(aws configure export-credentials --profile {named} --format env)", unset AWS_PROFILE, and run again'
        )
    return found


def _section(environ: Mapping[str, str], variable: str, usual: str, names: tuple[str, ...]) -> dict[str, str]:
    path = Path(environ.get(variable) or usual)
    parser = configparser.RawConfigParser(strict=False)
    problem = ""
    try:
        parser.read_string(path.expanduser().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or "isn't text"
    except configparser.Error:  # its text may hold the secret that it stumbled over
        problem = "can't be understood"
    if problem:
        raise OptionsError(f"{path}: the file of AWS profiles can't be used ({problem}); mend it, or point {variable} at another")
    return next((dict(parser[name]) for name in names if parser.has_section(name)), {})
