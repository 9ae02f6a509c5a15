"""The grammar of ``hf://``."""

from __future__ import annotations

import pytest
from streamer_huggingface.path import HubPath, parse_path

import streamer
from streamer import SourceError
from streamer.registry import Registry

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("rest", "repo", "path", "revision"),
    [
        ("org/name", "org/name", "", "main"),
        ("org/name@v1.0", "org/name", "", "v1.0"),
        (f"org/name@{COMMIT}", "org/name", "", COMMIT),
        ("org/name@branch/with/slash", "org/name", "", "branch/with/slash"),
        ("org/name@refs/pr/7", "org/name", "", "refs/pr/7"),
        ("org/name@user@host", "org/name", "", "user@host"),
        ("org/name/sub/folder", "org/name", "sub/folder", "main"),
        ("org/name/sub/folder@feat/x", "org/name", "sub/folder", "feat/x"),
        ("org/name/my folder@v1", "org/name", "my folder", "v1"),
        ("org/name/unet/m.safetensors", "org/name", "unet/m.safetensors", "main"),
        ("gpt2", "gpt2", "", "main"),
        ("gpt2@main", "gpt2", "", "main"),
        ("Org.x/Name-1_b", "Org.x/Name-1_b", "", "main"),
    ],
)
def test_what_is_named(rest, repo, path, revision):
    parsed = parse_path(rest)
    assert parsed == HubPath(repo, revision, path)
    assert parse_path(str(parsed).removeprefix("hf://")) == parsed


def test_a_commit_is_pinned():
    assert parse_path(f"org/name@{COMMIT}").pinned
    assert not parse_path("org/name@0123456").pinned
    assert not parse_path("org/name").pinned


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("", "hf:// names no model: write hf://org/name"),
        (None, "names no model"),
        ("org/name@", "hf://org/name@ has no revision after its @.* leave the @ out for main"),
        ("@main", "none of them empty"),
        ("org/", "none of them empty"),
        ("/name", "none of them empty"),
        ("org//name", "none of them empty"),
        ("org/name/", "none of them empty"),
        ("org/name/../other", "none of them empty, . or .."),
        ("org/na me", "org/na me cannot be a model's name"),
        ("org--x/name", "org--x/name cannot be a model's name"),
        ("org/name.git", "cannot be a model's name"),
        ("org/name@a b", "a b cannot be a revision"),
        ("org/name@../../x", "cannot be a revision"),
        ("org/name@/main", "cannot be a revision"),
        ("org/name@-x", "cannot be a revision"),
        ("org/name@a\nb", r"'a\\nb' cannot be a revision"),
        ("datasets/org/name", "one of the Hub's datasets, not a model"),
        ("models/org/name", "leave models/ out"),
    ],
)
def test_what_names_nothing(rest, expected):
    with pytest.raises(SourceError, match=expected) as caught:
        parse_path(rest)
    assert str(caught.value).isprintable()


def test_registered():
    import streamer_huggingface

    registry = Registry()
    registry.add(streamer_huggingface)
    (entry,) = registry.entries.values()
    assert entry.scheme == "hf"
    assert "hf://org/name" in entry.summary
    with pytest.raises(SourceError, match="no revision after its @"):
        streamer.open_source("hf://org/name@")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"no_cache": "maybe"}, "no_cache is true or false, not 'maybe'"),
        ({"connections": "0"}, "connections is a number from 1 on"),
        ({"connections": "-1", "no_cache": "true"}, "connections is a number from 1 on"),
        ({"no_cache": True, "cache_dir": "x"}, "neither cache_dir nor download_first"),
        ({"no_cache": True, "download_first": True}, "neither cache_dir nor download_first"),
        ({"endpoint": "localhost:1"}, "endpoint: 'localhost:1' is not the URL"),
        ({"revision": "main"}, "source hf does not take these options"),
    ],
)
def test_options_that_cannot_be(options, expected):
    with pytest.raises(streamer.UsageError, match=expected):
        streamer.open_source("hf://org/name", **options)


@pytest.mark.parametrize("token", ["hf_secret\n", "hf_sec ret", "hf_sécret"])
def test_a_token_that_cannot_be_sent_is_not_shown(token):
    with pytest.raises(streamer.UsageError, match="the token is not one") as caught:
        streamer.open_source("hf://org/name", token=token)
    assert "hf_s" not in str(caught.value)
