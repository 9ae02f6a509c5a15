"""``streamer push`` against real reference servers, and against servers that are not there."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from streamer import TensorSpec, WeightSource
from streamer.hookspecs import Register, hookimpl
from streamer.registry import Registry

SUMMARY = re.compile(
    r"pushed 4 tensors, 2\.15 kB, to (\d) workers? of (\d) servers? in \d+\.\d\d s "
    r"\(open \d.*, connect \d.*, update \d.* at \d[\d.]* (?:bytes|kB|MB)/s, finish \d.*\); "
    r"weight version (\S+)\n"
)


def test_in_a_pipe_it_is_quiet_and_says_one_line(
    run: Callable[..., Any], server: Any, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    ended = run("push", checkpoint, "--to", server.url)
    assert (ended.code, ended.stderr) == (0, "")
    match = SUMMARY.fullmatch(ended.stdout)
    assert match is not None, ended.stdout
    assert match.groups() == ("2", "1", server.weight_version)
    assert server.holds(tensors)
    assert not server.paused


def test_a_server_that_its_user_has_paused_stays_so_and_is_named(
    run: Callable[..., Any], server: Any, other_server: Any, checkpoint: Path
) -> None:
    server.post("/pause?mode=keep")
    to = ("--to", server.url, "--to", other_server.url)
    ended = run("push", checkpoint, *to, "--json")
    assert ended.code == 0
    assert ended.stderr == (
        f"streamer: warning: {server.url} was paused before, and still is: POST /resume to it\n"
    )
    assert [item["paused"] for item in json.loads(ended.stdout)["servers"]] == [True, False]
    assert (server.paused, other_server.paused) == (True, False)
    # Who pauses by himself knows.
    assert run("push", checkpoint, *to, "--pause", "none").stderr == ""
    server.post("/resume")
    assert run("push", checkpoint, *to).stderr == ""


def test_json_is_the_report_of_all_servers(
    run: Callable[..., Any],
    server: Any,
    other_server: Any,
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
) -> None:
    urls = [server.url, other_server.url]
    options = ["--per-tensor", "--buffer-size", "1KiB", "--weight-version", "step 7", "--json"]
    ended = run("push", checkpoint, "--to", urls[0], "--to", urls[1], *options)
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.count("\n") == 1
    report = json.loads(ended.stdout)
    assert (report["tensors"], report["bytes"]) == (4, 2154)
    assert report["chunks"] > 1
    assert [item["url"] for item in report["servers"]] == urls
    assert [item["world_size"] for item in report["servers"]] == [2, 1]
    assert report["weight_version"] == server.weight_version == other_server.weight_version
    assert report["weight_version"] == "step 7"
    seconds = report["seconds"]
    assert seconds["open"] > 0
    assert sum(seconds[name] for name in ("open", "connect", "update", "finish")) == pytest.approx(
        seconds["total"], abs=1e-3
    )
    assert server.holds(tensors)
    assert other_server.holds(tensors)


def test_verify_proves_the_arrival(
    invoke: Callable[..., Any], server: Any, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    ended = invoke("push", checkpoint, "--to", server.url, "--verify")
    assert (ended.code, ended.stderr) == (0, "")
    assert re.search(r"; weight version \S+; arrival: digest \(\d\.\d\d s\)\n$", ended.stdout)
    assert server.holds(tensors)
    report = json.loads(invoke("push", checkpoint, "--to", server.url, "--verify", "--json").stdout)
    assert [item["verified"] for item in report["servers"]] == ["digest"]
    assert report["seconds"]["verify"] > 0


def test_on_a_terminal_a_bar_is_drawn_beside_clean_json(
    on_terminal: Callable[..., Any], server: Any, checkpoint: Path
) -> None:
    ended = on_terminal("stderr", "push", checkpoint, "--to", server.url, "--json")
    assert ended.code == 0
    assert json.loads(ended.stdout)["tensors"] == 4
    for text in ("connecting to the servers", "finishing", "2.2/2.2 kB", "left"):
        assert text in ended.stderr


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no/such/folder", "--to", URL], 1, "no such file or folder: no/such/folder"),
        (["CHECKPOINT", "--to", URL], 1, f"{URL}/version: Connection refused"),
        (["nobody://x", "--to", URL], 1, "no source is registered for nobody://"),
        (["CHECKPOINT"], 2, "Missing option '--to' (see streamer push --help)"),
        (["CHECKPOINT", "--to", "ftp://host"], 2, "not a server URL: ftp://host"),
        (["CHECKPOINT", "--to", URL, "--to", URL], 2, "is given twice: give each server once"),
        (["CHECKPOINT", "--to", URL, "--buffer-size", "64M"], 2, "'64M' is not a size"),
        (["CHECKPOINT", "--to", URL, "--num-buffers", "0"], 2, "--num-buffers"),
        (["CHECKPOINT", "--to", URL, "--pause", "maybe"], 2, "--pause"),
        (["CHECKPOINT", "--to", URL, "--backend", "mpi"], 2, "--backend"),
        (
            ["CHECKPOINT", "--to", URL, "--timeout", "0"],
            2,
            "total timeout must be a time in seconds",
        ),
        (["CHECKPOINT", "--to", URL, "--timeout", "soon"], 2, "--timeout"),
        (["CHECKPOINT", "--to", URL, "--ca-bundle", "no/such"], 2, "--ca-bundle"),
        (["CHECKPOINT", "--to", URL, "--option", "rev=1"], 2, "does not take these options"),
        (["CHECKPOINT", "--to", URL, "--bogus"], 2, "No such option: --bogus"),
    ],
)
def test_errors(
    invoke: Callable[..., Any], checkpoint: Path, arguments: list[str], code: int, says: str
) -> None:
    given = [str(checkpoint) if item == "CHECKPOINT" else item for item in arguments]
    ended = invoke("push", *given)
    assert ended.code == code
    assert says in ended.error


def test_a_server_that_is_not_there_is_told_in_seconds(
    run: Callable[..., Any], checkpoint: Path, free_port: Callable[[], int]
) -> None:
    started = time.monotonic()
    ended = run("push", checkpoint, "--to", f"http://localhost:{free_port()}", "--json")
    assert ended.code == 1
    assert "Connection refused; is the server up?" in ended.error
    assert time.monotonic() - started < 20


def test_a_server_of_another_kind(
    invoke: Callable[..., Any], fake_server: Any, checkpoint: Path
) -> None:
    ended = invoke("push", checkpoint, "--to", fake_server.url)
    assert ended.code == 1
    assert f"{fake_server.url} has no /version (404): give the URL of the" in ended.error
    assert fake_server.posts == []


def test_a_server_that_refuses_the_workers(
    invoke: Callable[..., Any], server: Any, checkpoint: Path
) -> None:
    server.fail("/init_weight_transfer_engine", 500, "no room\nfor you")
    started = time.monotonic()
    ended = invoke("push", checkpoint, "--to", server.url)
    assert ended.code == 1
    assert "/init_weight_transfer_engine: 500 no room for you" in ended.error
    assert time.monotonic() - started < 20


def test_what_went_wrong_while_a_server_was_released_is_told_too(
    invoke: Callable[..., Any], server: Any, checkpoint: Path
) -> None:
    server.fail("/start_weight_update", 500, "no room")
    server.fail("/resume", 500, "not\nnow \x1b[2J", times=9, keep=True)
    ended = invoke("push", checkpoint, "--to", server.url)
    assert (ended.code, ended.stdout) == (1, "")
    (error,) = ended.stderr.splitlines()
    assert "/start_weight_update: 500 no room" in error
    assert "holds the old weights, but is marked incomplete and left paused" in error
    assert "/resume: 500 not now " in error
    assert error.isprintable()


def sent(fake_server: Any, name: str) -> set[str | None]:
    """What the calls so far had in this header."""
    return {requests.structures.CaseInsensitiveDict(c.headers).get(name) for c in fake_server.calls}


def test_headers_reach_the_server(
    invoke: Callable[..., Any],
    fake_server: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
) -> None:
    to = ("push", checkpoint, "--to", fake_server.url)
    monkeypatch.setenv("STREAMER_API_KEY", "from-env\n")
    for more, expected in (
        ((), "Bearer from-env"),
        (("--api-key", "from-option"), "Bearer from-option"),
        (("--header", "authorization:  Basic b25l"), "Basic b25l"),
    ):
        fake_server.calls.clear()
        ended = invoke("--debug", *to, "--header", "X-Team: rl", *more)
        assert ended.code == 1
        # One is made while torch is imported, on a thread that may outlive the push.
        eventually(lambda: sum("/server_info" in path for path in fake_server.paths) == 2)
        assert sent(fake_server, "Authorization") == {expected}
        assert sent(fake_server, "X-Team") == {"rl"}
        assert expected.split()[1] not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--header", "s3cret"),
        ("--header", "na me: s3cret"),
        ("--header", "Name: s3cret\nX: y"),
        ("--header", "Name: s3cret-é"),
        ("--api-key", "s3cret\x7f"),
    ],
)
def test_a_bad_header_is_refused_and_not_repeated(
    invoke: Callable[..., Any], checkpoint: Path, options: tuple[str, str]
) -> None:
    ended = invoke("--debug", "push", checkpoint, "--to", URL, *options)
    assert ended.code == 2
    assert "streamer: error: " in ended.stderr
    assert "s3cret" not in ended.stderr


class Source(WeightSource):
    """One tensor; remembers how it was opened and that it was closed."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.closed = 0
        self.weight_version = options.get("commit")

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec("w", torch.float32, (3,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        logging.getLogger("streamer").warning("what is\nto be said")
        yield "w", torch.arange(3.0)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def opened(registry: Registry) -> list[Source]:
    """The sources that ``mine://`` has opened."""
    sources: list[Source] = []

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register: Register) -> None:
            def open_it(rest: str, **options: str) -> Source:
                sources.append(Source({"rest": rest, **options}))
                return sources[-1]

            register("mine", open_it)

    registry.add(Plugin())
    return sources


def test_options_reach_the_source_which_is_closed(
    invoke: Callable[..., Any], server: Any, opened: list[Source]
) -> None:
    options = ("--option", "revision=a=b", "--option", "empty=")
    ended = invoke("push", "mine://x", "--to", server.url, *options)
    assert ended.code == 0
    assert ended.stderr == "streamer: warning: what is to be said\n"
    assert [source.options for source in opened] == [{"rest": "x", "revision": "a=b", "empty": ""}]
    assert [source.closed for source in opened] == [1]
    assert server.holds({"w": torch.arange(3.0)})


@pytest.mark.parametrize("command", [("push", "--to"), ("doctor", "--to"), ("plan",)])
def test_no_cache_is_for_sources_that_have_one(
    invoke: Callable[..., Any], server: Any, registry: Registry, opened: list[Source], command: Any
) -> None:
    given: list[dict[str, str]] = []

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register: Register) -> None:
            def open_it(rest: str, *, no_cache: str = "") -> Source:
                given.append({"no_cache": no_cache})
                return Source({})

            register("hub", open_it)

    registry.add(Plugin(), "hub")
    name, *to = command
    to = [*to, *[server.url] * bool(to)]
    assert invoke(name, "hub://x", *to, "--no-cache").code == 0
    assert given == [{"no_cache": "true"}]
    ended = invoke(name, "mine://x", *to, "--no-cache")
    assert ended.code
    assert "--no-cache: this source has no cache; leave it out" in ended.stdout + ended.stderr
    assert opened == []


def test_a_version_that_the_server_has_is_not_pushed_again_unless_forced(
    invoke: Callable[..., Any], server: Any, opened: list[Source]
) -> None:
    command = ("push", "mine://x", "--to", server.url, "--option", "commit=abc123")
    sent = [invoke(*command, *more).stdout for more in ((), (), ("--force",))]
    assert [line.partition(" ")[0] for line in sent] == ["pushed", "nothing", "pushed"]
    assert sent[1] == (
        "nothing to send: 1 server had weight version abc123 already (--force pushes it again)\n"
    )
    assert len(opened) == 3


def test_the_source_is_closed_after_a_failure_too(
    invoke: Callable[..., Any], opened: list[Source]
) -> None:
    assert invoke("push", "mine://x", "--to", URL).code == 1
    assert [source.closed for source in opened] == [1]


SLOW = """
import sys, time
from streamer import hookimpl

def open_it(rest):
    print("opening", flush=True)
    time.sleep(60)

@hookimpl
def streamer_register_sources(register):
    register("slow", open_it)
"""


def test_a_push_that_is_told_to_end_does(
    start: Callable[..., subprocess.Popen[str]], install: Callable[[str, str], str]
) -> None:
    path = install("slow_plugin", SLOW)
    interrupted, terminated, hung_up = (
        start("push", "slow://x", "--to", URL, PYTHONPATH=path) for _ in range(3)
    )
    for process, number, code, says in (
        (interrupted, signal.SIGINT, 130, "streamer: interrupted\n"),
        (terminated, signal.SIGTERM, 143, "streamer: terminated\n"),
        (hung_up, signal.SIGHUP, 129, "streamer: terminated\n"),
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "opening\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=20)
        assert (process.returncode, stdout, stderr) == (code, "", says)
