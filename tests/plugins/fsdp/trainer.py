"""One rank of the trainer: it runs scenarios that `conftest.Trainer` writes to its standard input.

A scenario is a function of this module. It gets the rank, how many there are, and its options, and
returns JSON. What it raises goes back as well, with the seconds that the rank has taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree
from models import KINDS, make, shard  # beside this script
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import streamer
from streamer import Timeouts
from streamer.broadcast.staging import Stage

TIMEOUTS = Timeouts(connect=20, progress=20)
Digests = dict[str, str]


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    ).hexdigest()


def digests(state: dict[str, torch.Tensor]) -> Digests:
    return {name: sha256(tensor.detach()) for name, tensor in state.items()}


def double(model: nn.Module) -> None:
    """A step of training whose result is exact."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def push(source: object, url: str | None, rank: int, **options: Any) -> dict[str, Any]:
    """Push once, as the documentation says: only rank 0 has the URL."""
    options = {"buffer_size": 2000, "timeouts": TIMEOUTS, **options}
    return asdict(streamer.push(source, url if rank == 0 else None, **options))


# Whole pushes


def training(rank: int, ranks: int, url: str, packed: bool) -> Any:
    """Three pushes over one session, with steps of training in between."""
    # What is left gathered is then of another dtype.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    reference, model = make(), shard(make(), mp_policy=policy)
    found = []
    with streamer.connect(
        url if rank == 0 else None,
        packed=packed if rank == 0 else not packed,  # what rank 0 says counts
        buffer_size=2000 if rank == 0 else 1000,
        timeouts=TIMEOUTS,
    ) as session:
        for step in range(3):
            report = session.push(model, weight_version=f"step-{step}")
            found.append([asdict(report), digests(reference.state_dict())])
            double(reference)
            double(model)
            with torch.no_grad():  # which leaves the outer parameters gathered
                model(torch.arange(29).view(1, -1))
            assert not isinstance(model.lm_head.weight, DTensor)
    return found


def once(rank: int, ranks: int, url: str, kind: str, **options: Any) -> Any:
    """One push of what `KINDS` makes: the report, and what must arrive."""
    source, expected = KINDS[kind](ranks)
    return [push(source, url, rank, **options), digests(expected)]


# What goes wrong

BREAKS = "layers.1.norm.weight"
"""In the middle of a chunk, with gathers before and behind it in the same one."""


def attempt(push_once: Callable[[], Any]) -> dict[str, Any]:
    """How a push fails, and after how many seconds."""
    started = time.monotonic()
    try:
        push_once()
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
        return {
            "error": kind,
            "text": text,
            "of": getattr(error, "rank", None),
            "seconds": time.monotonic() - started,
        }
    return {"error": None}


def at(source: object, name: str, act: Callable[[], None]) -> streamer.WeightSource:
    """``source`` with ``act()`` called when it is the turn of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        act()
        return tensor

    return streamer.map_tensors(
        source, lambda spec: [(spec, change)] if spec.name == name else None
    )


def broken() -> None:
    raise ValueError("made to\nfail")


def fails(
    rank: int,
    ranks: int,
    url: str,
    who: int,
    how: str,
    good: str = "",
    pid: int = 0,
    connect: float = 3,
) -> Any:
    """A push that one rank breaks, and then a good one over the same process group."""
    model = shard(make())
    timeouts = Timeouts(connect=connect, progress=20)
    source: object = model
    options: dict[str, Any] = {"timeouts": timeouts}

    def act() -> None:
        if how == "source":
            broken()
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "server dies":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        if how == "rank dies":
            os._exit(1)

    if rank == who and how in ("source", "interrupt", "server dies", "rank dies"):
        source = at(model, BREAKS, act)
    if how == "dropped":  # what is sent is numbered otherwise than what is gathered
        source = at(model, BREAKS, broken) if rank == who else model
        source = streamer.exclude(source, "embed.weight", "layers.0.*")
    if how == "tail":  # behind the last tensor that is sent
        source = at(model, "norm.weight", broken) if rank == who else model
        source = streamer.exclude(source, "norm.*", "lm_head.*")
    if rank == who and how == "last":
        source = at(model, "lm_head.weight", broken)
    if rank == who and how == "other model":
        source = shard(make(layers=3))
    if rank == who and how == "other shape":
        source = streamer.cast(model, "bfloat16", keep=["embed.*"])
    if rank == who and how == "specs":
        source = streamer.map_tensors(model, lambda spec: None)
        source._rule = lambda spec: {}[spec.name]  # it was right when it was opened
    if rank == who and how == "unopened":
        source = object()
    if rank == who and how == "connect":
        url = "ftp://host"
    if rank == who and how == "version":
        options["weight_version"] = ""
    if how == "other step":
        options["weight_version"] = "step-2" if rank == who else "step-3"
    if how == "other commit":
        source = streamer.open_source(model)
        source.weight_version = "step-2" if rank == who else "step-3"
    if how == "closed" and rank == who:
        session = streamer.connect(url if rank == 0 else None, timeouts=timeouts)
        session.close()
        failure = attempt(lambda: session.push(source))
    elif how == "absent" and rank == who:
        failure = {"error": None}
        time.sleep(4)
    else:
        failure = attempt(lambda: push(source, url, rank, **options))
    if how == "rank dies":
        return failure
    again = push(model, good or url, rank, weight_version="again")
    return [failure, again, digests(make().state_dict())]


def alone(rank: int, ranks: int, url: str) -> Any:
    """Rank 0 fails to open what only it pushes; then all push together."""
    failures = []
    if rank == 0:
        failures = [
            attempt(lambda: push("/no/such/file", url, rank)),
            attempt(lambda: push(object(), url, rank)),
        ]
    dist.barrier()
    return [failures, push(shard(make()), url, rank)["weight_version"]]


def urls_everywhere(rank: int, ranks: int, url: str, session: bool) -> Any:
    """A user who gives the URL on every rank."""
    model = shard(make())
    if session:
        with streamer.connect(url, timeouts=TIMEOUTS) as connected:
            connected.push(model)
            connected.push(model)
    else:
        streamer.push(model, url, timeouts=TIMEOUTS)
    return digests(make().state_dict())


def without_network(rank: int, ranks: int, url: str) -> Any:
    """What other ranks than the sender connect to, or look up."""
    used: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        used.append(repr(args))
        raise OSError("no network here")

    model = shard(make())
    with contextlib.ExitStack() as patched:
        if rank:
            for target, name in (
                (socket.socket, "connect"),
                (socket.socket, "connect_ex"),
                (socket.socket, "bind"),
                (socket, "getaddrinfo"),
            ):
                patched.enter_context(mock.patch.object(target, name, refuse))
        with streamer.connect(url if rank == 0 else None, timeouts=TIMEOUTS) as session:
            session.push(model)
        streamer.push(model, url if rank == 0 else None, timeouts=TIMEOUTS)
    return used


def no_url(rank: int, ranks: int) -> Any:
    """A sender that was given no server."""
    return attempt(lambda: streamer.push(shard(make()), None, timeouts=TIMEOUTS))


def known_already(rank: int, ranks: int, url: str) -> Any:
    """Weights that the server has: nothing is sent, and every rank knows."""
    source = streamer.open_source(shard(make()))
    source.weight_version = "commit-1"
    return [push(source, url, rank)["tensors"] for _ in range(2)]


def store_size(rank: int, ranks: int, url: str) -> Any:
    """How many keys the store has after each of several pushes, good ones and failed ones."""
    model = shard(make())
    store = dist.distributed_c10d._get_default_store()
    sizes = []
    for step in range(4):
        source = at(model, BREAKS, broken) if step == 2 and rank == 1 else model
        attempt(lambda source=source: push(source, url, rank))
        dist.barrier()
        sizes.append(store.num_keys())
        dist.barrier()
    return sizes


# Memory


class LiveTensors(TorchDispatchMode):
    """The most bytes at a time in large tensors that operations of this thread have made."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest = smallest
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.staging = False
        self.staged: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                self._watch(tensor.untyped_storage())
        # FSDP1 keeps its storage, and gives back the memory.
        refs = [ref for key, ref in self.live.items() if key not in self.staged]
        storages = [storage for ref in refs if (storage := ref()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in storages))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() >= self.smallest:
            self.live[id(storage)] = weakref.ref(storage)
            if self.staging:
                self.staged.add(id(storage))


class Stack(nn.Module):
    """Large layers of one size, and none of the parameters elsewhere."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, rows, bias=False) for _ in range(6))


def memory(rank: int, ranks: int, url: str, rows: int, kind: str) -> Any:
    """The peak of gathered bytes in whole tensors, and what of yielded ones is alive at each."""
    model: nn.Module = Stack(rows)
    size = rows * 512 * 4
    if kind == "fsdp1":
        cpu = torch.device("cpu")
        for index, layer in enumerate(model.layers):
            model.layers[index] = FullyShardedDataParallel(layer, device_id=cpu)
        model = FullyShardedDataParallel(model, device_id=cpu)
    else:
        shard(model)
    source = streamer.open_source(model)
    yielded: list[weakref.ref[Any]] = []
    alive: list[int] = []
    gather = type(source).__iter__

    def counted(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in gather(self):
            alive.append(sum(1 for ref in yielded if (old := ref()) is not None and old.nbytes()))
            yielded.append(weakref.ref(pair[1].untyped_storage()))
            yield pair
            del pair

    type(source).__iter__ = counted  # type: ignore[method-assign]
    live = LiveTensors(size)
    allocate = Stage.allocate

    def staged(self: Stage, nbytes: int) -> torch.Tensor:
        live.staging, before = True, live.staging
        try:
            return allocate(self, nbytes)
        finally:
            live.staging = before

    try:
        with live, mock.patch.object(Stage, "allocate", staged):
            report = push(source, url, rank, buffer_size=size)
    finally:
        type(source).__iter__ = gather  # type: ignore[method-assign]
    return {"tensors": report["tensors"], "alive": alive, "most": live.most / size}


def main() -> None:
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints goes to the log
    for line in sys.stdin:
        order = json.loads(line)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(order["store"], order["ranks"]),
            rank=rank,
            world_size=order["ranks"],
        )
        answer: dict[str, Any] = {}
        started = time.monotonic()
        try:
            scenario = globals()[order["scenario"]]
            answer["value"] = scenario(rank, order["ranks"], **order["options"])
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer |= {"error": type(error).__name__, "text": str(error)}
        answer["seconds"] = time.monotonic() - started
        dist.destroy_process_group()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
