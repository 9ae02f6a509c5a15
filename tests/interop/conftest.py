"""Real vLLM servers on the CPU, two at most at a time, and what they say when loaded from disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

import streamer
from kit_checks import find_free_port

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".vllm"
START_SECONDS = 240
ANSWER_SECONDS = 30
PROMPTS = ([1, 5, 9, 33, 7], [200, 100, 50], [3] * 12)
TOKENS = 12
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""sha256 of nothing: what a layer that vLLM has packed for oneDNN hashes as."""

# The server is the leader of a process group that ends with it, and with this process.
LAUNCH = """
exec 3<&0 </dev/null
{ read -r _ <&3; kill -KILL 0; } &
exec 3<&- "$@"
"""


@dataclass(frozen=True)
class Facts:
    """What a server with certain weights says: equal facts mean equal weights."""

    token_ids: tuple[tuple[int, ...], ...]
    checksums: dict[str, str]


class Server:
    """A vLLM server and its log."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.log = log
        self._process = process

    @classmethod
    def launch(
        cls,
        checkpoint: Path,
        *,
        workers: int,
        load_format: str,
        log: Path,
        core: int = 0,
        options: Sequence[str] = (),
    ) -> Server:
        """Start a server; with one worker on ``core``, a small number. See `wait_until_up`."""
        port = find_free_port()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores(core, workers)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        command = [str(VLLM / "bin/vllm"), "serve", str(checkpoint), "--served-model-name", "tiny"]
        command += ["--load-format", load_format, "--tensor-parallel-size", str(workers)]
        command += ["--enforce-eager", "--max-model-len", "256"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--weight-transfer-config", '{"backend": "streamer"}', *options]
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", LAUNCH, "launch", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        return cls(f"http://127.0.0.1:{port}", process, log)

    def wait_until_up(self) -> None:
        """Fail with the log if it does not come up."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                pytest.fail(f"vLLM exited with {self._process.returncode}:\n{self.tail()}")
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/get_world_size", timeout=5).ok:
                    return
            time.sleep(0.3)
        pytest.fail(f"vLLM was not up after {START_SECONDS} s:\n{self.tail()}")

    def stop(self) -> None:
        """Kill the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def tail(self, start: int | None = None) -> str:
        """The log from byte ``start``, or its end, without the frames of C++ stacks."""
        data = self.log.read_bytes()[-20_000 if start is None else start :]
        lines = data.decode(errors="replace").splitlines()
        return "\n".join([f"--- {self.log}", *(x for x in lines if not x.startswith("frame #"))])

    def get(self, path: str, timeout: float = ANSWER_SECONDS) -> Any:
        answer = requests.get(self.url + path, timeout=timeout)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: dict[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        answer = requests.post(self.url + path, json=body, timeout=timeout)
        answer.raise_for_status()
        return answer.json()

    def complete(self, prompt: list[int]) -> tuple[int, ...]:
        """The token ids that follow ``prompt``, the likeliest each time."""
        answer = self.post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        token_ids = tuple(answer["choices"][0]["token_ids"])
        assert len(token_ids) == TOKENS
        return token_ids

    def facts(self) -> Facts:
        """What tells these weights from others."""
        checksums = self.post("/weight_checker", {"action": "checksum"})["checksums"]
        known = {name: value for name, value in checksums.items() if value != EMPTY}
        assert known
        return Facts(tuple(self.complete(prompt) for prompt in PROMPTS), known)

    @property
    def paused(self) -> bool:
        value = self.get("/is_paused", timeout=10)["is_paused"]
        assert isinstance(value, bool)
        return value

    @property
    def weight_version(self) -> str:
        return str(self.get("/weight_info", timeout=10)["weight_version"])


class Traffic:
    """Requests beside a push: one after another while the ``with`` block runs, and more on demand.

    A request that fails fails the block. ``answers`` holds the token ids of those sent one after
    another, in order; ``extra`` of those sent by `ask`.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(8)
        self.answers: list[tuple[int, ...]] = []
        self.extra: list[Future[tuple[int, ...]]] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            self.answers.append(self._server.complete(PROMPTS[0]))

    def wait_for_more(self, count: int) -> None:
        """Block until ``count`` more of the ``answers`` have come."""
        wanted = len(self.answers) + count
        while len(self.answers) < wanted and not self._running.done():
            time.sleep(0.01)

    def ask(self) -> None:
        """Send one more request, and do not wait for it."""
        self.extra.append(self._pool.submit(self._server.complete, PROMPTS[0]))

    def __enter__(self) -> Traffic:
        self._running = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._running.result()
        for future in self.extra:
            future.result()


def cores(first: int, count: int) -> list[str]:
    """``count`` cores of those we may use, one a worker."""
    allowed = sorted(os.sched_getaffinity(0))
    return [str(allowed[(first + number) % len(allowed)]) for number in range(count)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoint folders of one shape, ``a`` and ``b``."""
    python = VLLM / "bin/python"
    if not python.exists():
        pytest.fail(f"there is no vLLM in {VLLM}: run `make vllm` (2 minutes)")
    folders = {name: tmp_path_factory.mktemp("checkpoints") / name for name in "ab"}
    arguments = [f"{folder}:{seed}" for seed, folder in enumerate(folders.values())]
    maker = Path(__file__).with_name("make_checkpoint.py")
    made = subprocess.run([python, maker, *arguments], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return folders


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session", params=[1, 2], ids=["one-worker", "two-workers"])
def workers(request: pytest.FixtureRequest) -> int:
    """How many workers each server has; the tests with one all run before those with two."""
    count: int = request.param
    return count


@pytest.fixture(scope="session")
def from_disk(checkpoints: dict[str, Path], workers: int, logs: Path) -> dict[str, Facts]:
    """What a server says that has loaded each checkpoint from disk, by name. They run no more."""
    servers: dict[str, Server] = {}
    try:
        for core, (name, checkpoint) in enumerate(checkpoints.items()):
            servers[name] = Server.launch(
                checkpoint,
                workers=workers,
                load_format="auto",
                log=logs / f"disk-{name}-{workers}.log",
                core=core,
            )
        for server in servers.values():
            server.wait_until_up()
        facts = {name: server.facts() for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.stop()
    assert facts["a"].token_ids != facts["b"].token_ids
    assert facts["a"].checksums != facts["b"].checksums
    return facts


@pytest.fixture(scope="session")
def dummy_server(
    checkpoints: dict[str, Path], from_disk: dict[str, Facts], workers: int, logs: Path
) -> Iterator[Server]:
    """A server with vLLM's dummy weights, until a test pushes others."""
    log = logs / f"live-{workers}.log"
    server = Server.launch(checkpoints["a"], workers=workers, load_format="dummy", log=log)
    try:
        server.wait_until_up()
        assert server.facts() not in from_disk.values()
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(dummy_server: Server, checkpoints: dict[str, Path]) -> Iterator[Server]:
    """The server, serving ``a``, whatever an earlier test left behind."""
    start = dummy_server.log.stat().st_size
    try:
        streamer.push(checkpoints["a"], to=dummy_server.url, weight_version="a")
        yield dummy_server
    finally:
        print(dummy_server.tail(start))


@pytest.fixture
def traffic(server: Server) -> Traffic:
    return Traffic(server)
