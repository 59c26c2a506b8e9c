"""Decides who gets which credentials: those of the URL, of the options for their origin, of ~/.netrc for a host; nobody others'."""

from __future__ import annotations

import base64
import netrc
import os
from pathlib import Path

from pipeline.errors import OptionsError
from pipeline.stores.http.address import Address
from pipeline.stores.http.options import HttpOptions


class Headers(dict[str, str]):
    """Headers of a request, whose repr shows only their names: locals may be printed."""

    def __repr__(self) -> str:
        return f"<Headers {', '.join(self)}>"


class Credentials:
    """What each origin is told about the user."""

    def __init__(self, options: HttpOptions) -> None:
        """Read netrc; raises OptionsError where that can't be, or where it isn't said whom the options' credentials are for."""
        if options.secret and not options.origin:
            raise OptionsError(
                "user, token or headers are given without origin: a manifest may name any server, and would have them sent there; "
                "give origin='https://host', the server that they are for"
            )
        self._origin = Address(options.origin).origin if options.origin else None
        self._headers = Headers(
            {"Authorization" if name.lower() == "authorization" else name: value for name, value in options.headers.items()}
        )
        if options.token:
            self._headers["Authorization"] = f"Bearer {options.token}"
        elif options.user:
            self._headers["Authorization"] = _basic(options.user, options.password)
        self._hosts = _netrc()

    def __repr__(self) -> str:
        return "<Credentials>"

    def of(self, address: Address) -> Headers:
        """Return the headers for a URL that the caller names; a redirect's target gets them only at the same origin."""
        headers = Headers(self._headers if address.origin == self._origin else {})
        if address.login is not None:
            headers["Authorization"] = _basic(*address.login)
        elif "Authorization" not in headers and address.host.strip("[]") in self._hosts:
            headers["Authorization"] = self._hosts[address.host.strip("[]")]
        return headers


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode(errors="surrogateescape")).decode()


def _netrc() -> Headers:
    """Return each host's Authorization; `default` isn't used: it would go to any server that a manifest names."""
    named = os.environ.get("NETRC")
    path = Path(named or "~/.netrc")
    problem: str | None = ""
    try:
        path = path if named else path.expanduser()
        found = netrc.netrc(path).hosts
    except netrc.NetrcParseError as error:  # its text may hold the password that it stumbled over
        found, problem = {}, f"line {error.lineno} can't be understood"
    except FileNotFoundError as error:
        found, problem = {}, error.strerror if named else ""
    except RuntimeError:  # this user has no home, so no such file: a number without a name, as containers run under
        found = {}
    except (OSError, UnicodeError) as error:
        found, problem = {}, getattr(error, "strerror", None) or "isn't text"
    if problem:
        raise OptionsError(f"{path}: the file of passwords can't be used ({problem}); mend it, or point NETRC at another")
    return Headers(
        {host.lower(): _basic(login or account, word or "") for host, (login, account, word) in found.items() if host != "default"}
    )
