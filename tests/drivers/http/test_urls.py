"""What is a URL of a server."""

from __future__ import annotations

import pytest

from kit_http import SECRET, shown
from streamer import (
    UsageError,
)
from streamer.drivers.http import HttpClient, normalize_url
from streamer.drivers.secrets import hide_user

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000///", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("http://host:8000/v1/", "http://host:8000"),
        ("http://host/prefix/v1", "http://host/prefix"),
        ("https://host/a/b/", "https://host/a/b"),
        ("http://host/v1beta", "http://host/v1beta"),
        ("host:8000", "http://host:8000"),
        ("host", "http://host"),
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://user:pw@host:1/v1", "http://user:pw@host:1"),
        ("HTTP://host", "http://host"),
    ],
)
def test_urls_are_normalised(url, expected):
    """Case 38."""
    assert normalize_url(url) == expected
    assert normalize_url(expected) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://host",
        "file:///etc/passwd",
        "http://host:0",
        "http://host:port",
        "http://host:99999",
        "http://host?x=1",
        "http://host/#here",
        "http://[::1",
        "http://[nonsense]:80",
        "://host",
    ],
)
def test_what_is_no_server_url_is_refused(url):
    with pytest.raises(UsageError, match="not a server URL"):
        normalize_url(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://host:1/p", "http://host:1/p"),
        ("http://user:pw@host:1/p", "http://…@host:1/p"),
        ("http://user:p@w@host", "http://…@host"),
        ("user:pw@host:1", "host:1"),
        ("host:1", "host:1"),
        ("http://host:1/models/me@org", "http://host:1/models/me@org"),
        ("http://user:p@w@host/me@org", "http://…@host/me@org"),
        ("http://user:p/w@host", "http://…@host"),
    ],
)
def test_user_and_password_are_hidden(url, expected):
    assert hide_user(url) == expected


@pytest.mark.parametrize("url", [f"http://u:{SECRET}@host:port", f"ftp://u:{SECRET}@host",
                                 f"u:{SECRET}@host:0", f"http://u:{SECRET}@[::1"])  # fmt: skip
def test_a_refused_url_does_not_show_its_password(url):
    with pytest.raises(UsageError) as caught:
        normalize_url(url)
    assert SECRET not in shown(caught.value)


def test_host_and_port():
    for url, host, port in [
        ("http://host:8000/p", "host", 8000),
        ("https://host", "host", 443),
        ("http://u:p@host", "host", 80),
        ("http://[::1]:5", "::1", 5),
    ]:
        one = HttpClient(url, connect_timeout=1)
        assert (one.host, one.port) == (host, port)
