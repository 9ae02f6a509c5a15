"""``streamer bench``: real runs of small sizes, what they say, and that nothing is left of them."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from streamer import Payload, TensorSpec, WeightSource
from streamer.bench.machine import commit
from streamer.hookspecs import Register, hookimpl
from streamer.registry import Registry

pytestmark = pytest.mark.timeout(100)
SVG = "{http://www.w3.org/2000/svg}"


def spans(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_every_stage_in_json_chart_and_timeline(run: Callable[..., Any], tmp_path: Path) -> None:
    files = tmp_path / "files"
    temporary = tmp_path / "temporary"
    files.mkdir()
    temporary.mkdir()
    chart, trace = files / "bench.svg", files / "bench.json"
    given = ("bench", "--size", "40MiB", "--repeats", "2", "--json")
    ended = run(*given, "--chart", chart, "--trace", trace, TMPDIR=str(temporary))
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.count("\n") == 1
    found = json.loads(ended.stdout)
    assert list(temporary.iterdir()) == []

    source = found["source"]
    assert source["synthetic"] is True
    assert source["tensors"] == 72
    assert source["bytes"] == pytest.approx(40 << 20, rel=0.1)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["commit"] == commit()
    assert found["machine"]["cores"] >= 1

    rows = found["rows"]
    assert {row["stage"] for row in rows} == {"read", "broadcast", "end to end"}
    assert list(found["left_out"]) == ["host to device"]
    assert found["failed"] == {}
    for row in rows:
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["median"] <= max(row["seconds"])
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 1e9 / row["median"], rel=0.01)
        if row["stage"] != "broadcast":
            assert row["bytes"] == source["bytes"]
    pushes = [row["value"] for row in rows if row["stage"] == "end to end"]
    assert pushes == [16 << 20]  # with chunks of 64 MiB there would be one alone

    best = {
        stage: max(row["gb_per_s"] for row in rows if row["stage"] == stage)
        for stage in ("read", "broadcast", "end to end")
    }
    assert found["bound"]["gb_per_s"] == min(best["read"], best["broadcast"])
    assert found["end_to_end"]["gb_per_s"] == best["end to end"]
    assert found["of_bound"] == pytest.approx(
        best["end to end"] / found["bound"]["gb_per_s"], rel=0.01
    )

    texts = [text.text for text in ElementTree.parse(chart).getroot().iter(f"{SVG}text")]
    for row in rows:
        assert f"{row['stage']}, {row['setting']}" in texts
        assert any(text and text == f"{row['gb_per_s']:.2f}"[: len(text)] for text in texts)
    assert f"bound: {found['bound']['stage']}" in texts

    traced = spans(trace)
    assert (
        sum(span["args"]["bytes"] for span in traced if span["name"] == "read") == (source["bytes"])
    )
    assert (
        sum(span["args"]["bytes"] for span in traced if span["name"] == "broadcast")
        == (source["bytes"])
    )


def test_a_source_goes_into_the_server_that_is_given(
    run: Callable[..., Any], server: Any, checkpoint: Path, tensors: dict[str, torch.Tensor]
) -> None:
    ended = run("bench", checkpoint, "--to", server.url, "--repeats", "1")
    assert (ended.code, ended.stderr) == (0, "")
    assert server.weight_version.startswith("streamer-")
    assert server.holds(tensors)
    assert not server.paused
    rows = [line.split("\t") for line in ended.stdout.splitlines()]
    assert rows[0][:2] == ["read", "first time"]
    (row,) = (row for row in rows if row[:2] == ["end to end", "16 MiB a chunk"])
    assert row[-1] == "1 server"
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["source"] == f"{checkpoint}, 4 tensors, 2.15 kB"
    assert "of the bound" in facts["end to end"]


def test_on_a_terminal_it_is_a_table(on_terminal: Callable[..., Any], checkpoint: Path) -> None:
    ended = on_terminal("stdout", "bench", checkpoint, "--repeats", "1")
    assert ended.code == 0
    for text in ("stage", "setting", "GB/s", "Gloo, hot buffer", "without host to device", "bound"):
        assert text in ended.stdout


def test_a_stage_that_fails_leaves_the_others(run: Callable[..., Any], checkpoint: Path) -> None:
    url = "http://127.0.0.1:9"
    ended = run("bench", checkpoint, "--to", url, "--repeats", "1", "--json")
    assert ended.code == 1
    found = json.loads(ended.stdout)
    assert {row["stage"] for row in found["rows"]} == {"read", "broadcast"}
    assert found["failed"] == {
        "end to end": f"GET {url}/version: Connection refused; is the server up?"
    }
    assert found["of_bound"] is None
    assert ended.stderr.count("\n") == 1
    assert "1 stage failed; end to end: GET" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "http://127.0.0.1:9"], 2, "--to needs a SOURCE"),
        (["--option", "a=b"], 2, "--option is for a SOURCE"),
        (["CHECKPOINT", "--size", "1MiB"], 2, "--size is for a checkpoint of random bytes"),
        (["--size", "much"], 2, "'much' is not a size"),
        (["--size", "900TiB"], 2, "give a smaller --size"),
        (["--repeats", "0"], 2, "--repeats"),
        (["--device", "cuda:7"], 2, "'cuda:7' is none of the 0 GPUs"),
        (["--device", "cpu"], 2, "'cpu' is none of the 0 GPUs"),
        (["--size", "32"], 2, "--size: 32 would be bytes: give a unit, as in 32MiB"),
        (["--chart", "b.png"], 2, "--chart: b.png: a chart is SVG: let its name end in .svg"),
        (["--chart", ""], 2, "--chart: give the name of a file"),
        (["--trace", ""], 2, "--trace: give the name of a file"),
        (["--chart", "no/such/bench.svg"], 2, "--chart: cannot write no/such/bench.svg: No such"),
        (["--trace", "no/such/bench.json"], 2, "--trace: cannot write no/such/bench.json: No such"),
        (["no/such/folder"], 1, "no such file or folder: no/such/folder"),
    ],
)
def test_errors(
    invoke: Callable[..., Any],
    checkpoint: Path,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    given = [str(checkpoint) if item == "CHECKPOINT" else item for item in arguments]
    ended = invoke("bench", *given)
    assert ended.code == code
    assert says in ended.error


class Nothing(WeightSource):
    def specs(self) -> list[TensorSpec]:
        return []

    def __iter__(self) -> Iterator[tuple[str, Payload]]:
        return iter(())


class Plugin:
    @hookimpl
    def streamer_register_sources(self, register: Register) -> None:
        register("nothing", lambda rest: Nothing())


def test_a_source_without_tensors(invoke: Callable[..., Any], registry: Registry) -> None:
    registry.add(Plugin())
    ended = invoke("bench", "nothing://")
    assert ended.code == 1
    assert ended.error == "the source has no tensors: nothing to measure"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_it(
    start: Callable[..., subprocess.Popen[str]],
    children: Callable[[int], list[int]],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # For ever, if the deadline did not end each stage: there is time to look at them.
    given = ("bench", "--size", "2MiB", "--repeats", "100000", "--deadline", "4")
    bench = start(*given, TMPDIR=str(temporary))
    deadline = time.monotonic() + 60
    # The server, its worker, and the process that receives broadcasts.
    while len(pids := family(children, bench.pid)) < 3:
        assert bench.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bench.send_signal(number)
    code = bench.wait(30)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -9)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)
    assert number == signal.SIGKILL or list(temporary.iterdir()) == []


def family(children: Callable[[int], list[int]], pid: int) -> list[int]:
    found = children(pid)
    return found + [child for each in found for child in family(children, each)]


def test_a_push_writes_its_timeline(
    run: Callable[..., Any], server: Any, checkpoint: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "push.json"
    ended = run("push", checkpoint, "--to", server.url, "--trace", trace)
    assert (ended.code, ended.stderr) == (0, "")
    names = [span["name"] for span in spans(trace)]
    for name in ("plan", "rendezvous", "read", "broadcast", f"POST {server.url}/resume"):
        assert name in names


def test_a_push_that_fails_writes_its_timeline_too(
    invoke: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "push.json"
    ended = invoke("push", checkpoint, "--to", "http://127.0.0.1:9", "--trace", trace)
    assert "Connection refused" in ended.error
    assert "GET http://127.0.0.1:9/version" in [span["name"] for span in spans(trace)]


def test_a_timeline_that_cannot_be_written_ends_a_push_before_it_begins(
    invoke: Callable[..., Any], server: Any, checkpoint: Path
) -> None:
    before = server.weight_version
    ended = invoke("push", checkpoint, "--to", server.url, "--trace", "no/such/push.json")
    assert ended.code == 2
    assert "--trace: cannot write no/such/push.json: No such file or directory" in ended.error
    assert server.weight_version == before
