"""Case 29: what the Hub refuses, in one line that names model, revision, and token or none."""

from __future__ import annotations

import logging
import time
import traceback

import pytest
from huggingface_hub import constants

import streamer
from streamer import SourceError

GOOD = "hf_GoodTokenOfAGoodUser"
STRANGER = "hf_stranger"
INVALID = "hf_0123456789invalid"

BOTH = pytest.mark.parametrize("no_cache", [True, False], ids=["no_cache", "cache"])


@pytest.fixture
def refused(open_hub):
    """The message with which opening fails: one line, and no token in it or around it."""

    def message(rest: str, **options: object) -> str:
        with pytest.raises(SourceError) as caught:
            open_hub(rest, **options)
        text = str(caught.value)
        assert text.isprintable(), text
        assert len(text) < 600
        everything = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        for token in (GOOD, STRANGER, INVALID):
            assert token not in everything
        return text

    return message


def starts(text: str, *parts: str) -> None:
    """``parts`` follow one another in ``text``, the first at its start."""
    position = 0
    for part in parts:
        found = text.find(part, position)
        assert found >= 0, f"{part!r} not after byte {position} of {text!r}"
        position = found + len(part)
    assert text.startswith(parts[0])


@BOTH
class TestCase29:
    def test_gated(self, hub, model, refused, no_cache):
        hub.repos["org/name"].gated = True
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: ", "the model is gated (no token was sent); ask for acc")
        starts(text, "hf://", f"{hub.url}/org/name", "set HF_TOKEN, or run: hf auth login")
        text = refused("org/name@v1.0", no_cache=no_cache, token=STRANGER)
        starts(text, "hf://org/name@v1.0: ", "gated, and the account of this token has no access")
        starts(text, "hf://", "(a token was sent); ask for it at ", f"{hub.url}/org/name")

    def test_private(self, hub, model, refused, open_hub, contents, no_cache):
        hub.repos["org/name"].private = True
        text = refused("org/name@feat/x", no_cache=no_cache)
        starts(text, "hf://org/name@feat/x: there is no such model, or it is private (401")
        starts(text, "hf://", "(no token was sent); check the name; for a private one set HF_TOKEN")
        text = refused("org/name", no_cache=no_cache, token=STRANGER)
        starts(text, "hf://org/name@main: there is no such model, or it is private (404: Repos")
        starts(text, "hf://", "(a token was sent); check the name, and that this token may read it")
        assert contents(open_hub("org/name", no_cache=no_cache, token=GOOD)) == model.raw

    def test_missing(self, refused, no_cache):
        text = refused("org/nothing", no_cache=no_cache)
        starts(text, "hf://org/nothing@main: there is no such model", "(no token was sent)")
        text = refused("gpt2", no_cache=no_cache, token=GOOD)
        starts(text, "hf://gpt2@main: there is no such model", "a model is called org/name")

    def test_an_invalid_token(self, hub, model, refused, no_cache):
        text = refused("org/name", no_cache=no_cache, token=INVALID)
        starts(text, "hf://org/name@main: the Hub does not take this token, or", "(401: Invalid")
        starts(text, "hf://", "(a token was sent); check the name, and renew the token")

    def test_a_missing_revision(self, model, refused, no_cache):
        text = refused("org/name@v2", no_cache=no_cache)
        starts(text, "hf://org/name@v2: the model has no branch, tag or commit v2 (no token was")
        text = refused("org/name@main/sub/folder", no_cache=no_cache)
        starts(text, "hf://org/name@main/sub/folder: ", "a folder goes before the @")
        text = refused(f"org/name@{'f' * 40}", no_cache=no_cache)
        starts(text, f"hf://org/name@{'f' * 40}: the model has no branch, tag or commit")

    def test_a_file_that_is_gone(self, hub, model, refused, no_cache):
        headers = {"X-Error-Code": "EntryNotFound"}
        hub.fault(lambda each: "00002-of" in each.path, times=9, status=404, headers=headers)
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: there is no file model-00002-of-00002.safetensors (no to")

    def test_forbidden(self, hub, model, refused, no_cache):
        headers = {"X-Error-Message": "Access to this resource is disabled."}
        hub.fault(lambda each: True, times=9, status=403, headers=headers)
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: the Hub does not allow it (403: Access to this resource")

    def test_too_many_requests(self, hub, model, refused, no_cache):
        hub.fault(lambda each: "/api/" in each.path, times=99, status=429)
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: too many requests for the Hub (429) (no token was sent)")
        assert len(hub.asked) == 5

    def test_a_hub_that_is_down(self, hub, model, refused, no_cache):
        hub.fault(lambda each: True, times=99, status=502)
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: the Hub failed (502")

    def test_no_hub(self, refused, free_port, no_cache):
        text = refused("org/name", no_cache=no_cache, endpoint=f"http://127.0.0.1:{free_port()}")
        starts(text, "hf://org/name@main: no answer from 127.0.0.1 or its storage: Connection refu")

    def test_a_silent_hub(self, hub, model, refused, no_cache, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        hub.fault(lambda each: True, times=99, silent=30)
        text = refused("org/name", no_cache=no_cache)
        starts(text, "hf://org/name@main: no answer from 127.0.0.1 or its storage: ", "timed out")

    def test_what_is_no_hub(self, hub, refused, no_cache, start_fake, reply):
        server = start_fake()
        server.routes["GET /api/models/org/name/revision/main"] = reply("<html>", 200)
        text = refused("org/name", no_cache=no_cache, endpoint=server.url)
        starts(text, "hf://org/name@main: ", "(no token was sent)")


def test_a_cache_that_cannot_be_written(model, refused, tmp_path):
    (tmp_path / "file").touch()
    text = refused("org/name", cache_dir=tmp_path / "file")
    starts(
        text, "hf://org/name@main: model.safetensors.index.json: ", "check HF_ENDPOINT, and the f"
    )


class TestCase27:
    @BOTH
    def test_the_hubs_own_header_is_understood(self, hub, model, open_hub, monkeypatch, no_cache):
        headers = {"RateLimit": '"api";r=0;t=1'}
        hub.fault(lambda each: "/api/" in each.path, status=429, headers=headers)
        started = time.monotonic()
        assert open_hub("org/name", no_cache=no_cache).specs()
        assert time.monotonic() - started >= 1

    @BOTH
    def test_it_waits_as_the_hub_asks(self, hub, model, open_hub, contents, no_cache):
        hub.fault(lambda each: "/api/" in each.path, status=429, headers={"Retry-After": "1"})
        hub.fault(lambda each: "/resolve/" in each.path, status=429, headers={"Retry-After": "1"})
        assert contents(open_hub("org/name", no_cache=no_cache)) == model.raw
        assert [each.status for each in hub.asked].count(429) == 2


@BOTH
def test_the_token_is_in_no_log_and_no_repr(hub, model, open_hub, contents, caplog, no_cache):
    caplog.set_level(logging.DEBUG)
    hub.repos["org/name"].private = True
    source = open_hub("org/name", no_cache=no_cache, token=GOOD)
    assert contents(source) == model.raw
    assert any("Authorization" in each.headers for each in hub.asked)
    shown = [repr(source), repr(vars(source)), caplog.text, str(source.specs())]
    for value in vars(source).values():
        shown += [repr(value), repr(getattr(value, "__dict__", ""))]
    assert GOOD not in "".join(shown)


@BOTH
def test_the_stored_login_is_used(hub, model, open_hub, tmp_path, monkeypatch, no_cache):
    hub.repos["org/name"].private = True
    (tmp_path / "token").write_text(GOOD)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert open_hub("org/name", no_cache=no_cache).specs()
    with pytest.raises(SourceError, match="no token was sent"):
        open_hub("org/name", no_cache=no_cache, token=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(streamer.UsageError, match="none is stored"):
        open_hub("org/name", no_cache=no_cache, token=True)
