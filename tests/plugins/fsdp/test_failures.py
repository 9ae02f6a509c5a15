"""Pushes that one rank, or the server, breaks: all ranks raise, soon, and the next push works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Arrived = Callable[[dict[str, str]], bool]

SOON = 6.0
"""Seconds, on a busy machine, of a process group that would wait for half an hour."""


@pytest.fixture
def fails(trainer: Any) -> Callable[..., list[dict[str, Any]]]:
    """How a push fails on each rank; the next one over the same process group must work."""

    def run(ranks: int, who: int, how: str, **options: Any) -> list[dict[str, Any]]:
        found = trainer.values("fails", ranks, who=who, how=how, **options)
        assert all(again == found[0][1] for _, again, _ in found)
        assert found[0][1]["weight_version"] == "again"
        failures: list[dict[str, Any]] = [failure for failure, _, _ in found]
        for rank, failure in enumerate(failures):
            if how == "absent" and rank == who:
                assert failure == {"error": None}
                continue
            assert failure["error"], f"rank {rank} did not fail"
            assert failure["text"].isprintable()
            assert failure["seconds"] < SOON
        return failures

    return run


def others(failures: list[dict[str, Any]], who: int) -> set[tuple[str, str, int]]:
    """What the ranks say that were not the ones to fail."""
    return {
        (failure["error"], failure["text"].partition(";")[0], failure["of"])
        for rank, failure in enumerate(failures)
        if rank != who
    }


def test_a_server_that_dies(fails: Any, server: Any, start_server: Any, arrived: Arrived) -> None:
    doomed = start_server(2)
    failures = fails(3, 0, "server dies", url=doomed.url, good=server.url, pid=doomed.process.pid)
    assert failures[0]["error"] in ("ServerUnreachable", "TransportError")
    text = f"rank 0 failed: {failures[0]['error']}: {failures[0]['text'].partition(';')[0]}"
    assert others(failures, 0) == {("RankError", text, 0)}
    assert server.weight_version == "again"


def test_a_server_that_is_not_there(fails: Any, server: Any, free_port: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    failures = fails(3, 0, "", url=url, good=server.url)
    assert failures[0]["error"] == "ServerUnreachable"
    for failure in failures[1:]:
        assert failure["text"] == f"rank 0 failed: ServerUnreachable: {failures[0]['text']}"


@pytest.mark.parametrize(
    "path",
    [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ],
)
def test_a_server_that_answers_500(fails: Any, server: Any, path: str) -> None:
    """Before the first byte, in the middle, and after the last."""
    server.fail(path)
    failures = fails(2, 0, "", url=server.url)
    assert failures[0]["error"] == "ServerRefused"
    assert "made to fail" in failures[0]["text"]
    ((error, text, of),) = others(failures, 0)
    assert (error, of) == ("RankError", 0)
    assert text.startswith("rank 0 failed: ServerRefused: ")
    assert "made to fail" in text
    assert server.weight_version == "again"


@pytest.mark.parametrize("how", ["source", "last", "dropped", "tail"])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_whose_source_fails(
    fails: Any, server: Any, arrived: Arrived, who: int, how: str
) -> None:
    failures = fails(3, who, how, url=server.url)
    assert failures[who]["error"] == "SourceError"
    what = "ValueError: made to fail"
    assert failures[who]["text"].partition(";")[0].endswith(what)
    ((error, text, of),) = others(failures, who)
    assert (error, of) == ("RankError", who)
    assert text.startswith(f"rank {who} failed: SourceError: source failed at tensor ")
    assert text.endswith(what)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_interrupted(fails: Any, server: Any, who: int) -> None:
    failures = fails(2, who, "interrupt", url=server.url)
    assert failures[who]["error"] == "KeyboardInterrupt"
    assert others(failures, who) == {("RankError", f"rank {who}: KeyboardInterrupt", who)}


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_specs_fail(fails: Any, server: Any, who: int) -> None:
    server.heal()
    failures = fails(2, who, "specs", url=server.url)
    assert failures[who]["text"] == "the source's specs() failed: KeyError: 'embed.weight'"
    text = f"rank {who} failed: SourceError: {failures[who]['text']}"
    assert others(failures, who) == {("RankError", text, who)}


@pytest.mark.parametrize("how", ["other model", "other shape"])
def test_ranks_that_push_other_tensors(fails: Any, server: Any, how: str) -> None:
    failures = fails(3, 2, how, url=server.url)
    assert failures[2]["error"] == "SpecMismatch"
    assert failures[2]["text"].startswith(
        "tensor 21 is layers.2.steps int64[] here, and another one on rank 0"
        if how == "other model"
        else "tensor 2 is layers.0.norm.weight bfloat16[13] here, and another one on rank 0"
    )
    assert others(failures, 2) == {
        ("RankError", f"rank 2 failed: SpecMismatch: {failures[2]['text']}", 2)
    }


@pytest.mark.parametrize("how", ["other step", "other commit"])
def test_ranks_that_push_other_steps(fails: Any, server: Any, how: str) -> None:
    failures = fails(3, 1, how, url=server.url)
    text = (
        "rank 1 pushes weight version 'step-2', and rank 0 'step-3': every rank must push the same "
        "step at the same time"
    )
    assert [(each["error"], each["text"]) for each in failures] == [("RankError", text)] * 3


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_does_not_come(fails: Any, server: Any, who: int) -> None:
    failures = fails(3, who, "absent", url=server.url)
    ((error, text, of),) = others(failures, who)
    assert (error, of) == ("RankError", who)
    assert text.startswith(f"rank {who} did not come within 3 s: every rank of the process group")


@pytest.mark.parametrize(
    ("who", "how", "text"),
    [
        (0, "unopened", "SourceError: no source accepts an object;"),
        (1, "unopened", "SourceError: no source accepts an object;"),
        (0, "connect", "UsageError: not a server URL: ftp://host"),
        (0, "version", "UsageError: the weight version is empty: give a name"),
        (2, "version", "UsageError: the weight version is empty: give a name"),
        (0, "closed", "UsageError: the session is closed: connect again"),
        (1, "closed", "UsageError: the session is closed: connect again"),
    ],
)
def test_a_rank_that_fails_before_it_has_a_source(
    fails: Any, server: Any, who: int, how: str, text: str
) -> None:
    """The others are told, long before the connect timeout."""
    failures = fails(3, who, how, url=server.url, good=server.url, connect=20)
    for rank, failure in enumerate(failures):
        if rank != who:
            assert failure["error"] == "RankError"
            assert failure["text"].startswith(f"rank {who} failed: {text}")
            assert failure["of"] == who


def test_a_push_of_one_rank_alone_that_fails(trainer: Any, server: Any) -> None:
    """A text is told of at once; whether others push an object, too, is waited for, not for long.
    The others take nothing of it for an end of their own push."""
    (failures, version), *rest = trainer.values("alone", 3, url=server.url)
    path, other = failures
    assert (path["error"], other["error"]) == ("SourceError", "SourceError")
    assert path["seconds"] < 2
    assert 4 < other["seconds"] < 8
    assert rest == [[[], version]] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_in_the_middle(trainer: Any, start_server: Any, who: int) -> None:
    """The group reports it: Gloo at once."""
    server = start_server(1)
    answers = trainer.run("fails", 3, dies=who, who=who, how="rank dies", url=server.url)

    for rank, answer in enumerate(answers):
        if rank != who:
            assert answer["value"]["error"] in ("SourceError", "RankError"), answer
            assert answer["value"]["seconds"] < SOON


@pytest.mark.parametrize("session", [True, False], ids=["connect", "push"])
def test_only_the_sender_contacts_the_server(
    trainer: Any, server: Any, arrived: Arrived, session: bool
) -> None:
    """Also where every rank is given the URL."""
    server.heal()
    found = trainer.values("urls_everywhere", 3, url=server.url, session=session)
    calls = server.calls
    assert calls.count("POST /init_weight_transfer_engine") == 1
    assert calls.count("GET /get_world_size") == 1
    assert calls.count("POST /update_weights") == (2 if session else 1)
    assert arrived(found[0])


def test_other_ranks_touch_no_network(trainer: Any, server: Any) -> None:
    assert trainer.values("without_network", 3, url=server.url) == [[], [], []]


def test_a_sender_without_a_server(trainer: Any) -> None:
    sender, follower = trainer.values("no_url", 2)
    assert sender["text"] == "this process sends, and needs a server: give its URL, not None"
    assert follower["text"] == f"rank 0 failed: UsageError: {sender['text']}"
    assert follower["of"] == 0


def test_weights_that_the_server_has_are_not_gathered(trainer: Any, server: Any) -> None:
    assert trainer.values("known_already", 3, url=server.url) == [[24, 0]] * 3


def test_the_store_does_not_grow(trainer: Any, server: Any) -> None:
    for sizes in trainer.values("store_size", 3, url=server.url):
        first, *rest = sizes
        assert max(rest) <= first + 2, sizes  # the keys of the second push
        assert rest == sorted(rest)
