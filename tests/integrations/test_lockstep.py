"""`Lockstep`: what ranks can only produce together, pushed by all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import streamer
from streamer import Ranks, SourceError, TensorSpec
from streamer.integrations.lockstep import Lockstep

SCRIPT = Path(__file__).with_name("lockstep_rank.py")


def run(url, store, *arguments, meanwhile=lambda: None):
    """Two ranks; how the pushes of each have ended, and how often it has gone through its pairs."""
    command = [sys.executable, SCRIPT, url]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), store, *arguments], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        meanwhile()
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)[-4000:]
    return [json.loads(Path(f"{store}.{rank}").read_text()) for rank in range(2)]


def check_whole(server):
    """The third push has arrived."""
    expected = {
        f"t{i}": torch.cat([torch.full((500,), 10.0 * i + rank + 300) for rank in range(2)])
        for i in range(12)
    }
    assert server.holds(expected)
    assert not server.paused


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights"])
def test_a_refused_push_leaves_no_rank_behind(server, tmp_path, route):
    """The ranks are ahead of each other in the gathers when it ends; the next push is whole."""
    server.fail("/finish_weight_update", 0, delay=0.5)  # of the first push

    def refuse_the_second():
        while "POST /finish_weight_update" not in server.calls:
            time.sleep(0.01)
        server.fail(route, keep=True)

    (first, passes), (second, _) = run(server.url, tmp_path / "store", meanwhile=refuse_the_second)
    assert first[0] == second[0] == "push-0"
    assert "made to fail" in first[1]
    assert "RankError: rank 0 failed" in second[1]
    assert first[2] == second[2] == "push-2"
    assert passes == 4  # of which one for the specs
    check_whole(server)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gives_its_push_up_ends_it_on_all(server, tmp_path, rank):
    ranks = run(server.url, tmp_path / "store", str(rank))
    assert [ended[0] for ended, _ in ranks] == ["push-0"] * 2
    assert ranks[rank][0][1].startswith("TimeoutError")
    assert f"RankError: rank {rank} failed: PushCancelled" in ranks[1 - rank][0][1]
    assert [ended[2] for ended, _ in ranks] == ["push-2"] * 2
    check_whole(server)


def test_alone_it_needs_no_process_group(server):
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    source = Lockstep(tensors.items, specs=specs)
    assert source.ranks is None
    assert source.specs() is specs
    streamer.push(source, to=server.url)
    assert server.holds(tensors)


def test_in_a_group_of_one_rank_it_leads_nobody(server):
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    source = Lockstep(tensors.items, ranks=Ranks(HashStore(), 0, 1))
    for version in ("v1", "v2"):
        report = streamer.push(source, to=server.url, weight_version=version)
        assert report.tensors == 2
    assert server.holds(tensors)
    assert (server.paused, server.weight_version) == (False, "v2")


def test_in_a_group_of_one_rank_its_failure_is_that_of_any_source(server):
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]

    def pairs():
        yield "a", tensors["a"]
        raise RuntimeError("no such layer")

    source = Lockstep(pairs, specs=specs, ranks=Ranks(HashStore(), 0, 1))
    with pytest.raises(SourceError, match="RuntimeError: no such layer"):
        streamer.push(source, to=server.url)
    streamer.push(Lockstep(tensors.items), to=server.url)
    assert server.holds(tensors)
    assert not server.paused
