"""URLs: used as they are given, shown without secrets, the same object however they are signed."""

from __future__ import annotations

import re

import pytest
from faulty import Faulty
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RemoteError
from pipeline.stores.http import Address, HttpStore, identity

PLAIN = "https://h.org/a/b.tar"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h/a b/c.tar", "/a%20b/c.tar"),
        ("http://h/a%20b%2Fc%2fd.tar", "/a%20b%2Fc%2fd.tar"),
        ("http://h/a+b&c=d;e,f@g:h!$'()*~.tar", "/a+b&c=d;e,f@g:h!$'()*~.tar"),
        ("http://h/é/א.tar", "/%C3%A9/%D7%90.tar"),
        ("http://h/100%.tar?x=50%", "/100%25.tar?x=50%25"),
        ("http://h/a/../b//c/./d", "/a/../b//c/./d"),
        ('http://h/a[1]{2}|^`<>"\\', "/a[1]%7B2%7D%7C%5E%60%3C%3E%22%5C"),
        ("http://h?x=1", "/?x=1"),
        ("http://h", "/"),
        ("http://h/a?x=a+b&y=c%26d&z=/?:@ e#part?x", "/a?x=a+b&y=c%26d&z=/?:@%20e"),
        ("http://h/a\r\nHost: evil", "/a%0D%0AHost:%20evil"),
        ("http://h/a?" + "X-Amz-Signature=" + "f" * 5000, "/a?X-Amz-Signature=" + "f" * 5000),
    ],
)
def test_a_url_is_quoted_once(url: str, target: str) -> None:
    """What can't be sent is quoted; what is quoted, or needs no quoting, stays as it is."""
    assert Address(url).target == target
    assert Address(f"http://h{target}").target == target


@given(st.text(max_size=30))
def test_any_path_can_be_sent(text: str) -> None:
    """Whatever a path holds, what is sent is one word of printable ASCII, and quoting it again changes nothing."""
    target = Address(f"http://h/{text}").target
    assert target.isascii()
    assert all("!" <= sign <= "~" for sign in target)
    assert Address(f"http://h{target}").target == target


def test_what_is_sent_is_what_was_given() -> None:
    """The server sees the very bytes; long queries of signed URLs too."""
    targets = ["/a%2fb+c%20d&e.tar?X-Amz-Credential=a%2F2026&X-Amz-Signature=" + "0f" * 3000, "/a/../b.tar"]
    with Faulty({"/a/b+c d&e.tar": b"data", "/a/../b.tar": b"data"}) as server, HttpStore() as store:
        for target in targets:
            assert store.fetch(server.url(target), 10) == b"data"
        assert [request.target for request in server.log] == targets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:SECRET@h.org/a.tar?X-Amz-Signature=SECRET#SECRET", "https://h.org/a.tar?..."),
        ("HTTPS://H.org:443/A.tar", "https://h.org/A.tar"),
        ("http://[::1]:8000/a", "http://[::1]:8000/a"),
        ("https://user:SEC/RET@h.org/a", "https://..."),
        ("https://user:1/SECRET@h.org/a", "https://..."),
        ("https://user:SEC?RET@h.org/a", "https://..."),
        ("https://user:SEC@RET@h.org/a", "https://h.org/a"),
        ("s3://SECRET", "URL://..."),
        ("http://h:99999/a", "http://..."),
        ("http://h:0/a", "http://..."),
        ("http:///a", "http://..."),
    ],
)
def test_no_secret_is_shown(url: str, shown: str) -> None:
    """Text and repr leave out user, password, query and fragment; of what can't be taken apart, all."""
    assert str(Address(url)) == shown
    assert shown in repr(Address(url))
    assert "SECRET" not in repr(Address(url))


@pytest.mark.parametrize(
    "url", ["s3://b/k", "a.tar", "", "http://", "http:///a", "http://a b/c", "http://h:x/", "http://u:p/w@h/a", "http://[::1/a"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    """A URL that can't be asked for says what to write."""
    with pytest.raises(RemoteError, match=r"write it as https://host/folder/name\.tar"):
        Address(url).check()
    with pytest.raises(RemoteError), HttpStore() as store:
        store.look(url)


def test_a_long_url_is_shown_short() -> None:
    """A message stays readable."""
    assert len(str(Address("https://h/" + "a" * 5000))) < 250


@pytest.mark.parametrize(
    "signature",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F2026&X-Amz-Date=2026&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=a",
        "X-Amz-Security-Token=abc&x-amz-signature=b",
        "AWSAccessKeyId=K&Signature=a%2B&Expires=123",
        "Expires=1&Signature=a&Key-Pair-Id=K",
        "Policy=e30_&Signature=a&Key-Pair-Id=K",
        "X-Goog-Algorithm=G&X-Goog-Credential=c&X-Goog-Date=d&X-Goog-Expires=1&X-Goog-SignedHeaders=host&X-Goog-Signature=s",
        "sv=2023-01-03&st=2026&se=2027&sr=b&sp=r&sig=abc%3D",
        "sp=r&sip=1.2.3.4&spr=https&sv=2023&sr=c&skoid=o&sktid=t&skt=1&ske=2&sks=b&skv=3&sig=x",
        "token=abc",
    ],
)
def test_a_url_signed_anew_is_the_same_object(signature: str) -> None:
    """The identity leaves out what signs, and only that; it shows nothing of a query."""
    assert identity(f"{PLAIN}?{signature}") == PLAIN
    versioned = identity(f"{PLAIN}?versionId=7&part=2")
    assert identity(f"{PLAIN}?versionId=7&{signature}&part=2") == versioned != identity(f"{PLAIN}?versionId=8&part=2")
    assert re.fullmatch(re.escape(PLAIN) + r"\?[0-9a-f]{16}", versioned)
    assert identity(f"https://user:pw@H.ORG:443/a/b.tar?{signature}#x") == PLAIN


@pytest.mark.case("H06")
def test_names_that_sign_elsewhere_may_name_an_object() -> None:
    """`st`, `sr` or `Expires` sign nothing on their own: two objects never become one."""
    urls = [
        f"{PLAIN}?{query}"
        for query in ("st=1", "st=2", "sr=1", "se=1", "Expires=1", "Policy=1", "id=1", "id=2", "ID=1", "id=1&id=2", "")
    ]
    urls += [
        "https://h.org/a/c.tar",
        "https://h.org/A/b.tar",
        "http://h.org/a/b.tar",
        "https://h.org:8443/a/b.tar",
        "https://h.org/a%2Fb.tar",
    ]
    assert len({identity(url) for url in urls}) == len(urls)


@pytest.mark.parametrize(
    ("location", "there"),
    [
        ("https://other.org/x?y=1#z", "https://other.org/x?y=1"),
        ("//other.org/x", "https://other.org/x"),
        ("/x y", "https://h.org/x%20y"),
        ("c.tar?d=/", "https://h.org/a/c.tar?d=/"),
        ("/%2fx", "https://h.org/%2fx"),
        ("?v=2", "https://h.org/a/b.tar?v=2"),
        ("/\u00c3\u00a9.tar", "https://h.org/%C3%A9.tar"),  # UTF-8 as http.client reads it
        ("https://[broken", ""),
        ("ftp://h.org/a", ""),
    ],
)
def test_a_redirect_leads_where_it_says(location: str, there: str) -> None:
    """A location may be whole or relative, and is quoted once like any URL."""
    found = Address(PLAIN).follow(location)
    assert (f"{found.scheme}://{found.authority}{found.target}" if found.host else "") == there
