"""Pushes into vLLM engines that are objects: engines.py KIND WORKERS CHECKPOINT_A CHECKPOINT_B

KIND is LLM or AsyncLLM, of this process, or RayLLM, held by an actor. Prints one JSON line: the
token ids that the engine answers after each step, and what was said. Disk prints those of engines
that have loaded the checkpoints themselves. Run where vLLM is installed.
"""
# ruff: noqa: TID251

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import streamer
from streamer.drivers.mark import INCOMPLETE
from streamer.events import ChunkSent

PROMPTS = ([1, 5, 9, 33, 7], [200, 100, 50], [3] * 12)
BUFFER_SIZE = 20_000


class Torn(streamer.WeightSource):
    """The first half of another source."""

    def __init__(self, folder: str) -> None:
        self._inner = streamer.open_source(folder)

    def specs(self) -> Sequence[streamer.TensorSpec]:
        return self._inner.specs()

    def __iter__(self) -> Iterator[tuple[str, streamer.Payload]]:
        for index, pair in enumerate(self._inner):
            if index == len(self.specs()) // 2:
                raise OSError("the disk is on fire")
            yield pair


def arguments(folder: str, workers: int) -> dict[str, Any]:
    return {
        "model": folder,
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": 256,
        "tensor_parallel_size": workers,
        "weight_transfer_config": {"backend": "streamer"},
    }


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts() -> list[Any]:
    return [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]


def token_ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_llm(workers: int, a: str, b: str) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(**arguments(a, workers))

    def answers() -> list[list[int]]:
        return token_ids(llm.generate(prompts(), sampling(), use_tqdm=False))

    return steps(llm, answers, llm.get_weight_version, a, b)


def from_disk(workers: int, a: str, b: str) -> dict[str, Any]:
    from vllm import LLM

    found = {}
    for name, folder in (("a", a), ("b", b)):
        llm = LLM(**arguments(folder, workers) | {"load_format": "auto"})
        found[name] = token_ids(llm.generate(prompts(), sampling(), use_tqdm=False))
        del llm
    return found


def with_ray(workers: int, a: str, b: str) -> dict[str, Any]:
    import ray

    class Actor:
        """What a user's actor looks like: vLLM's methods, and those of the rollout."""

        def __init__(self, **options: Any) -> None:
            from vllm import LLM

            self.llm = LLM(**options)

        def answers(self) -> list[list[int]]:
            return token_ids(self.llm.generate(prompts(), sampling(), use_tqdm=False))

        def get_world_size(self) -> int:
            return self.llm.get_world_size()

        def init_weight_transfer_engine(self, request: Any) -> None:
            self.llm.init_weight_transfer_engine(request)

        def shutdown_weight_transfer_engine(self) -> None:
            self.llm.shutdown_weight_transfer_engine()

        def start_weight_update(self) -> None:
            self.llm.start_weight_update()

        def update_weights(self, request: Any) -> None:
            self.llm.update_weights(request)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.llm.finish_weight_update(weight_version)

        def update_weight_version(self, new_version: str) -> None:
            self.llm.update_weight_version(new_version)

        def get_weight_version(self) -> str:
            return self.llm.get_weight_version()

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(Actor).remote(**arguments(a, workers))
    engine = streamer.Engine(actor, backend="streamer", device="cpu")
    return steps(
        engine,
        lambda: ray.get(actor.answers.remote()),
        lambda: ray.get(actor.get_weight_version.remote()),
        a,
        b,
    )


def steps(engine: Any, answers: Any, version: Any, a: str, b: str) -> dict[str, Any]:
    found: dict[str, Any] = {"dummy": answers()}
    with streamer.connect(engine, buffer_size=BUFFER_SIZE) as session:
        report = session.push(a, weight_version="a", force=True)
        found["a"], found["versions"] = answers(), [version()]
        found["server"] = [report.servers[0].url, report.servers[0].world_size]
        try:
            session.push(Torn(b), weight_version="torn")
        except streamer.StreamerError as error:
            found["torn"] = str(error)
        found["versions"].append(version())
        session.push(b, weight_version="b")
        found["b"] = answers()
        found["versions"].append(version())
    with streamer.connect(engine, verify=True) as session:  # the workers have left, and join again
        found["verified"] = session.push(a, weight_version="a").servers[0].verified
    found["again"] = answers()
    return found


async def with_async_llm(workers: int, a: str, b: str) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(a, workers)))
    number = 0

    async def answer(prompt: Any) -> Any:
        nonlocal number
        number += 1
        last = None
        async for output in engine.generate(prompt, sampling(), str(number)):
            last = output
        return last

    async def answers() -> list[list[int]]:
        return token_ids(await asyncio.gather(*map(answer, prompts())))

    found: dict[str, Any] = {"dummy": await answers()}
    meanwhile: list[asyncio.Task[Any]] = []

    def on_event(event: Any) -> None:
        # It is paused by now: what is asked waits, and is answered with the new weights.
        if isinstance(event, ChunkSent) and event.bytes == event.total_bytes:
            meanwhile.append(asyncio.ensure_future(answers()))

    async with streamer.aconnect(engine, buffer_size=BUFFER_SIZE, on_event=on_event) as session:
        report = await session.apush(a, weight_version="a", force=True)
        found["a"], found["versions"] = await answers(), [await engine.get_weight_version()]
        found["server"] = [report.servers[0].url, report.servers[0].world_size]
        try:
            await session.apush(Torn(b), weight_version="torn")
        except streamer.StreamerError as error:
            found["torn"] = str(error)
        found["is_paused"] = await engine.is_paused()
        found["versions"].append(await engine.get_weight_version())
        await session.apush(b, weight_version="b")
        found["b"] = await answers()
        found["versions"].append(await engine.get_weight_version())
        found["meanwhile"] = [await task for task in meanwhile]
    report = await streamer.apush(a, engine, weight_version="a", verify=True)
    found["verified"] = report.servers[0].verified
    found["again"] = await answers()
    engine.shutdown()
    return found


def check(found: dict[str, Any], disk: dict[str, Any], workers: int) -> None:
    """What must hold of an engine that was pushed to, given what ``disk`` answers for a and b."""
    assert found["dummy"] not in disk.values()
    assert found["a"] == found["again"] == disk["a"]
    assert found["b"] == disk["b"]
    first, torn, last = found["versions"]
    assert (first, last) == ("a", "b")
    assert torn.startswith(f"{INCOMPLETE}torn#")
    assert "the disk is on fire" in found["torn"]
    assert "holds a mixture of old and new weights" in found["torn"]
    assert found["server"][1] == workers
    assert found["verified"] == "digest"


if __name__ == "__main__":
    kind, count, *folders = sys.argv[1:]
    if kind == "AsyncLLM":
        result = asyncio.run(with_async_llm(int(count), *folders))
    else:
        run = {"Disk": from_disk, "LLM": with_llm, "RayLLM": with_ray}[kind]
        result = run(int(count), *folders)
    print(f"\nfound {json.dumps(result)}", flush=True)
