"""``streamer plan``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from streamer import TensorSpec, WeightSource
from streamer.hookspecs import Register, hookimpl
from streamer.registry import Registry

SPECS = [
    TensorSpec("a.weight", torch.bfloat16, (1000, 1000)),
    TensorSpec("a.scale", torch.float32, ()),
    TensorSpec("evil\n\t\x1b[2Jname", torch.uint8, (2, 3)),
    TensorSpec("b.weight", torch.bfloat16, (1500, 1000)),
]


class OnlySpecs(WeightSource):
    """Has specs; a plan must not iterate."""

    def __init__(self) -> None:
        self.closed = 0

    def specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("plan reads no tensor")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def source(registry: Registry) -> OnlySpecs:
    """What ``specs://`` opens."""
    source = OnlySpecs()

    class Plugin:
        @hookimpl
        def streamer_register_sources(self, register: Register) -> None:
            register("specs", lambda rest: source)  # type: ignore[arg-type, misc]

    registry.add(Plugin())
    return source


def test_in_a_pipe_facts_and_chunks_are_whole_lines(
    invoke: Callable[..., Any], source: OnlySpecs
) -> None:
    ended = invoke("plan", "specs://", "--buffer-size", "1MiB", "--num-buffers", "2")
    assert (ended.code, ended.stderr) == (0, "")
    assert [line.split("\t") for line in ended.stdout.splitlines()] == [
        ["tensors", "4"],
        ["bytes", "5.00 MB (5,000,010 bytes)"],
        [
            "dtypes",
            "bfloat16 (2 tensors, 5.00 MB), uint8 (1 tensor, 6 bytes), float32 (1 tensor, 4 bytes)",
        ],
        ["largest tensor", "b.weight bfloat16[1500, 1000], 3.00 MB (3,000,000 bytes)"],
        ["chunks", "2 in 1 call, 2 broadcasts"],
        ["staging memory", "6.00 MB (6,000,128 bytes): 2 x 3.00 MB"],
        ["0", "1", "2,000,000", "a.weight", "a.weight"],
        ["1", "3", "3,000,010", "a.scale", "b.weight"],
    ]
    assert source.closed == 1


def test_every_tensor_is_listed_and_no_name_breaks_the_line(
    invoke: Callable[..., Any], source: OnlySpecs
) -> None:
    ended = invoke("plan", "specs://", "--tensors", "--per-tensor")
    assert ended.code == 0
    assert [line.split("\t") for line in ended.stdout.splitlines()[4:]] == [
        ["chunks", "1 in 1 call, 4 broadcasts"],
        ["staging memory", "5.00 MB (5,000,704 bytes): 1 x 5.00 MB"],
        ["a.weight", "bfloat16", "[1000, 1000]", "2,000,000", "0"],
        ["a.scale", "float32", "[]", "4", "0"],
        ["evil \\x1b[2Jname", "uint8", "[2, 3]", "6", "0"],
        ["b.weight", "bfloat16", "[1500, 1000]", "3,000,000", "0"],
    ]


def test_json_is_one_object(invoke: Callable[..., Any], source: OnlySpecs) -> None:
    ended = invoke("plan", "specs://", "--buffer-size", "1MiB", "--json", "--tensors")
    assert (ended.code, ended.stderr) == (0, "")
    value = json.loads(ended.stdout)
    assert ended.stdout.count("\n") == 1
    assert [spec["name"] for spec in value.pop("tensor_list")] == [spec.name for spec in SPECS]
    assert value == {
        "tensors": 4,
        "bytes": 5_000_010,
        "dtypes": {
            "bfloat16": {"tensors": 2, "bytes": 5_000_000},
            "uint8": {"tensors": 1, "bytes": 6},
            "float32": {"tensors": 1, "bytes": 4},
        },
        "largest_tensor": 3_000_000,
        "packed": True,
        "buffer_size": 1 << 20,
        "calls": 1,
        "broadcasts": 2,
        "staging_bytes": 6_000_128,
        "chunks": [
            {"index": 0, "tensors": 1, "bytes": 2_000_000, "first": "a.weight", "last": "a.weight"},
            {"index": 1, "tensors": 3, "bytes": 3_000_010, "first": "a.scale", "last": "b.weight"},
        ],
    }


def test_a_checkpoint_on_a_terminal(on_terminal: Callable[..., Any], checkpoint: Path) -> None:
    ended = on_terminal("stdout", "plan", checkpoint)
    assert (ended.code, ended.stderr) == (0, "")
    for text in ("staging memory", "first tensor", "model.embed.weight"):
        assert text in ended.stdout
    assert "\t" not in ended.stdout


def test_a_reader_that_goes_away_is_no_error(
    start: Callable[..., subprocess.Popen[str]], checkpoint: Path
) -> None:
    # Unbuffered the first print fails, buffered the last flush.
    processes = [start("plan", checkpoint, PYTHONUNBUFFERED=value) for value in ("", "1")]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    for process in processes:
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "streamer", "sources"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "streamer: error: OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no/such/folder"], 1, "no such file or folder: no/such/folder"),
        (["nobody://x"], 1, "no source is registered for nobody://"),
        (["specs://", "--buffer-size", "big"], 2, "--buffer-size: 'big' is not a size"),
        (["specs://", "--option", "a=1"], 2, "does not take these options"),
        (["specs://", "--option", "a"], 2, "--option: 'a' is not KEY=VALUE"),
        (["specs://", "--option", "source=a"], 2, "--option: 'source=a' is not KEY=VALUE"),
        (["specs://", "--option", "a=1", "--option", "a=2"], 2, "--option: a is given twice"),
        (["specs://", "--num-buffers", "0"], 2, "--num-buffers"),
    ],
)
def test_errors(
    invoke: Callable[..., Any], source: OnlySpecs, arguments: list[str], code: int, says: str
) -> None:
    ended = invoke("plan", *arguments)
    assert ended.code == code
    assert says in ended.error


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("revision", "--option: 'revision' is not KEY=VALUE: this source takes base, tied"),
        ("bas=x", "got an unexpected keyword argument 'bas'; it takes base, tied"),
    ],
)
def test_a_wrong_option_is_told_with_those_of_the_source(
    invoke: Callable[..., Any], option: str, says: str
) -> None:
    ended = invoke("plan", "peft://adapter", "--option", option)
    assert ended.code == 2
    assert says in ended.error
