"""The real vLLM on GPUs: every checksum and token id against a server that loaded from disk.

    CUDA_VISIBLE_DEVICES=1 python tests/gpu/check_vllm.py --site SITE --serve serve_vllm.sh \
        --make make_checkpoint.py --models 0.6b,fp8,moe,8b

``--serve`` starts a server (MODEL GPU PORT [vLLM arguments]), with the packages in ``--site``.
The receiving servers are on GPU 0, those that load from disk with the sender, on another or, with
``NCCL_HOSTID`` set, on the same one (see run.sh). Prints one line a check, and exits with 1 if any
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

import streamer

PROMPT = [1, 5, 9, 33, 7]
PROVES = {"streamer": "digest", "nccl": "not proven"}
failures: list[str] = []


def check(what: str, good: bool, detail: object = "") -> None:
    print(f"{'ok  ' if good else 'FAIL'} {what} {detail}", flush=True)
    if not good:
        failures.append(what)


class Server:
    """A vLLM server in a process of its own."""

    def __init__(
        self, arguments: argparse.Namespace, model: Path, gpu: int, port: int, *extra: str
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        environment = dict(os.environ, SITE=arguments.site)
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        if "NCCL_HOSTID" in environment:  # one GPU for all, which NCCL takes for several hosts
            environment["NCCL_HOSTID"] = f"receiver-{port}"
        self.process = subprocess.Popen(
            ["bash", arguments.serve, str(model), str(gpu), str(port), *extra],
            env=environment,
            start_new_session=True,
        )

    def wait(self, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                requests.get(self.url + "/get_world_size", timeout=2).raise_for_status()
                return
            except requests.RequestException:
                time.sleep(1)
        raise SystemExit(f"{self.url} did not come up: see vllm_{self.url[-4:]}.log")

    def checksums(self) -> dict[str, str]:
        answer = requests.post(
            self.url + "/weight_checker", json={"action": "checksum"}, timeout=120
        ).json()
        checksums: dict[str, str] = answer["checksums"]
        return checksums

    def tokens(self, timeout: float = 60) -> list[int]:
        body = {
            "model": "m",
            "prompt": [PROMPT],
            "max_tokens": 24,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = requests.post(self.url + "/v1/completions", json=body, timeout=timeout).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def stop(self) -> None:
        os.killpg(self.process.pid, 9)
        self.process.wait()


def compare(what: str, server: Server, want: dict[str, str], tokens: list[int]) -> None:
    got = server.checksums()
    equal = sum(got.get(key) == value for key, value in want.items())
    check(f"{what}: checksums", got == want, f"{equal} of {len(want)} equal")
    check(f"{what}: token ids", server.tokens() == tokens)


def push(server: Server, folder: Path, **options: Any) -> streamer.Report:
    report = streamer.push(str(folder), to=server.url, **options)
    print(json.dumps(report.as_json()), flush=True)
    return report


def kill_mid_broadcast(server: Server, folder: Path) -> None:
    """A trainer that dies by SIGKILL with the broadcast under way, and the next one."""
    script = (
        "import os, sys, torch, streamer\n"
        "class Dies(streamer.WeightSource):\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def specs(self): return self.inner.specs()\n"
        "    def __iter__(self):\n"
        "        for number, pair in enumerate(self.inner):\n"
        "            if number == 60:\n"
        "                import time; time.sleep(1); os.kill(os.getpid(), 9)\n"
        "            yield pair\n"
        "source = Dies(streamer.open_source(sys.argv[1]))\n"
        "streamer.push(source, to=sys.argv[2], buffer_size=8 << 20)\n"
    )
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", script, str(folder), server.url], timeout=120, check=False
    )
    died = time.monotonic()
    answered = None
    while time.monotonic() - died < 30:
        try:
            answered = requests.get(server.url + "/is_paused", timeout=2).json()
            break
        except requests.RequestException:
            time.sleep(0.2)
    seconds = time.monotonic() - died
    check("trainer killed: the server answers again", answered is not None, f"{seconds:.1f} s")
    print(f"(the trainer lived {died - started:.1f} s)", flush=True)
    version = requests.get(server.url + "/weight_info", timeout=5).json()["weight_version"]
    check("trainer killed: marked incomplete", version.startswith("streamer-incomplete:"), version)
    push(server, folder)
    server.tokens()
    print(f"(a completion {time.monotonic() - died:.1f} s after the trainer's death)", flush=True)


class Breaks(streamer.WeightSource):
    """Raises after ``good`` tensors."""

    def __init__(self, folder: Path, good: int) -> None:
        self.inner, self.good = streamer.open_source(str(folder)), good

    def specs(self) -> Any:
        return self.inner.specs()

    def __iter__(self) -> Any:
        for number, pair in enumerate(self.inner):
            if number == self.good:
                raise ValueError("the disk is on fire")
            yield pair


def source_fails(server: Server, folder: Path) -> None:
    """The stream is completed with filler, so that even vLLM's own engine goes on.

    Far enough in that bytes have gone out: what is staged ahead is at most the pinned ring.
    """
    try:
        streamer.push(Breaks(folder, 250), to=server.url, buffer_size=8 << 20)
        check("source fails: an error", False)
    except streamer.SourceError as error:
        check("source fails: an error", "disk is on fire" in str(error), error)
    answer = requests.get(server.url + "/is_paused", timeout=5).json()
    check("source fails: the server answers, paused", answer == {"is_paused": True})


class Model:
    """A checkpoint, a server that loaded it from disk, and one for each backend that did not."""

    def __init__(self, arguments: argparse.Namespace, name: str, port: int) -> None:
        self.name = name
        work = Path(arguments.work)
        size = {"fp8": "0.6b"}.get(name, name)
        self.first, self.second = work / f"{size}-7", work / f"{size}-8"
        for folder, seed in ((self.first, "7"), (self.second, "8")):
            make(arguments, folder, size, seed)
        # Without a fixed cache vLLM counts what its neighbours allocate meanwhile as its own.
        extra = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)]
        extra += ["--quantization", "fp8"] if name == "fp8" else []
        backends = arguments.backends.split(",")
        here = int(os.environ["CUDA_VISIBLE_DEVICES"])
        self.disk = Server(arguments, self.first, here, port, "--load-format", "auto", *extra)
        self.servers = {
            backend: Server(
                arguments,
                self.first,
                0,
                port + number,
                "--weight-transfer-config",
                json.dumps({"backend": backend}),
                *extra,
            )
            for number, backend in enumerate(backends, start=1)
        }

    def check(self) -> None:
        """Push both ways to each server, and break a sync in between."""
        self.disk.wait()
        want, tokens = self.disk.checksums(), self.disk.tokens()
        self.disk.stop()
        for backend, server in self.servers.items():
            what = f"{self.name}, {backend}"
            server.wait()
            push(server, self.first)
            compare(f"{what}: packed", server, want, tokens)
            with streamer.connect(server.url, packed=False) as session:
                print(json.dumps(session.push(str(self.second)).as_json()), flush=True)
                if self.second != self.first:
                    check(f"{what}: another checkpoint differs", server.checksums() != want)
                if self.name == "0.6b":
                    source_fails(server, self.second)
                    if backend == "streamer":
                        kill_mid_broadcast(server, self.second)
                print(json.dumps(session.push(str(self.first)).as_json()), flush=True)
            compare(f"{what}: per tensor, second sync", server, want, tokens)
            verified = push(server, self.first, verify=True).servers[0].verified
            # vLLM's own engine: the same weights twice prove nothing.
            check(f"{what}: verify", verified == PROVES[backend], verified)
            server.stop()

    def stop(self) -> None:
        for server in (self.disk, *self.servers.values()):
            with contextlib.suppress(ProcessLookupError):
                server.stop()


def make(arguments: argparse.Namespace, folder: Path, size: str, seed: str) -> None:
    if folder.exists():
        return
    if size != "moe":
        command = [arguments.make, str(folder), size, seed]
    else:
        tokenizer = folder.with_name("0.6b-7")
        make(arguments, tokenizer, "0.6b", "7")
        command = [str(Path(__file__).with_name("make_moe.py")), str(folder), str(tokenizer), seed]
    subprocess.run([sys.executable, *command], check=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", required=True)
    parser.add_argument("--serve", required=True)
    parser.add_argument("--make", required=True)
    parser.add_argument("--models", default="0.6b,fp8,moe")
    parser.add_argument("--backends", default="nccl,streamer")
    parser.add_argument("--work", default="/tmp/check")
    arguments = parser.parse_args()
    Path(arguments.work).mkdir(parents=True, exist_ok=True)
    models: list[Model] = []
    try:
        for number, name in enumerate(arguments.models.split(",")):
            models.append(Model(arguments, name, 8100 + 10 * number))
        for model in models:
            model.check()
    finally:
        for model in models:
            model.stop()
    print(f"{len(failures)} failed" if failures else "all good", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
