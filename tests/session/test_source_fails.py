"""The source fails: what the servers hold then, and how the next push cures it."""

from __future__ import annotations

import pytest
import torch

from kit_checks import all_told, both_modes
from kit_session import JOIN, MIXTURE, UPDATE, weights
from streamer import SourceError, SpecMismatch, TensorSpec, hookimpl, registry
from streamer.drivers.mark import INCOMPLETE
from streamer.registry import Registry

pytestmark = pytest.mark.timeout(120)


@both_modes
def test_a_source_that_fails_midway_leaves_a_mixture_that_the_next_push_cures(
    session, server, push, make_source, packed
):
    one = session(server, packed=packed)
    push(one, [server], weights(1))

    def fail(index):
        if index == 6:
            raise OSError("disk on fire")

    server.heal()
    with pytest.raises(SourceError, match=r"source failed at tensor 6 \(layers.6.weight\)") as got:
        one.push(make_source(weights(2), on_step=fail), weight_version="half")
    if UPDATE in server.calls:
        assert all_told(got.value) == {server.url: MIXTURE}
        assert MIXTURE in str(got.value)
        assert server.weight_version.startswith(f"{INCOMPLETE}half#")
        assert server.paused
    server.heal()
    push(one, [server], weights(3))
    assert JOIN not in server.calls, "the group was whole"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
def test_a_source_that_fails_at_its_first_tensor_changes_nothing(
    session, server, push, make_source
):
    one = session(server)
    push(one, [server], weights(1), weight_version="before")
    for source in (
        make_source({}, make_source(weights(2)).specs()),
        make_source([("other", torch.zeros(1))], make_source(weights(2)).specs()),
        make_source({"a": torch.eye(2).to_sparse()}),
        make_source({"a": torch.empty(2, device="meta")}),
        make_source(
            {"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])},
            [TensorSpec("a", torch.float32, (2, 2))],
        ),
    ):
        with pytest.raises(SourceError, match=r"^tensor 0|^source ended after 0") as caught:
            one.push(source)
        assert caught.value.held == {}
        assert server.weight_version == "before"
        assert not server.paused
        assert server.holds(weights(1))


def test_one_tensor_more_than_declared(session, server, push, make_source):
    one = session(server)
    tensors = weights(1)
    declared = make_source(tensors).specs()
    with pytest.raises(SpecMismatch, match="gave more after all"):
        one.push(make_source({**tensors, "more": torch.zeros(1)}, declared))
    push(one, [server], weights(2))


def test_sources_are_closed_by_whoever_opened_them(session, server, make_source, monkeypatch):
    mine = make_source(weights(1))
    opened = make_source(weights(2))
    broken = make_source(weights(3), on_step=lambda index: 1 / 0)

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register):
            register("opened", lambda rest: broken if rest else opened)

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    one = session(server)
    one.push(mine)
    one.push("opened://")
    with pytest.raises(SourceError, match="ZeroDivisionError"):
        one.push("opened://broken")
    assert (mine.closed, opened.closed, broken.closed) == (0, 1, 1)


def test_a_source_that_cannot_be_closed_is_logged(
    session, server, make_source, monkeypatch, caplog
):
    """The servers have the weights by then: the push has succeeded."""
    source = make_source(weights(2))

    def fail():
        raise OSError("made to fail")

    source.close = fail

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register):
            register("unclosed", lambda rest: source)

    plugins = Registry()
    plugins.add(Plugin())
    monkeypatch.setattr(registry, "_default", plugins)
    assert session(server).push("unclosed://").tensors == len(weights(2))
    (record,) = caplog.records
    assert record.getMessage() == "the source's close() failed"
    assert "made to fail" in str(record.exc_info[1])
