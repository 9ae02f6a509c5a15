"""The real vLLM on two GPUs: every checksum and token id against a server that loaded from disk.

    python tests/gpu/check_vllm.py --site SITE --serve serve_vllm.sh --make make_checkpoint.py \
        --size 0.6b [--reference rlhf_http_nccl_no_vllm.py]

The servers are on GPU 0 (and the one that loads from disk on GPU 1), the sender is on GPU 1. Prints
one line a check and exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
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
    """A trainer that dies by SIGKILL with the broadcast under way."""
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
        "streamer.push(Dies(streamer.open_source(sys.argv[1])), to=sys.argv[2], buffer_size=8 << 20)\n"
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", required=True)
    parser.add_argument("--serve", required=True)
    parser.add_argument("--make", required=True)
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--backends", default="nccl,streamer")
    parser.add_argument("--reference")
    parser.add_argument("--work", default="/tmp/check")
    arguments = parser.parse_args()
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    first, second = work / f"{arguments.size}-7", work / f"{arguments.size}-8"
    makers = [
        subprocess.Popen([sys.executable, arguments.make, str(folder), arguments.size, seed])
        for folder, seed in ((first, "7"), (second, "8"))
        if not folder.exists()
    ]
    for maker in makers:
        maker.wait()
    share = ("--gpu-memory-utilization", "0.25")
    disk = Server(arguments, first, 1, 8107, "--load-format", "auto", *share)
    servers = {
        backend: Server(
            arguments,
            first,
            0,
            8110 + number,
            "--weight-transfer-config",
            json.dumps({"backend": backend}),
            *share,
        )
        for number, backend in enumerate(arguments.backends.split(","))
    }
    everyone = [disk, *servers.values()]
    try:
        for server in everyone:
            server.wait()
        want, tokens = disk.checksums(), disk.tokens()
        disk.stop()
        everyone.remove(disk)
        for backend, server in servers.items():
            check(f"{backend}: dummy weights differ", server.checksums() != want)
            push(server, first)
            compare(f"{backend}: packed", server, want, tokens)
            with streamer.connect(server.url, packed=False) as session:
                print(json.dumps(session.push(str(second)).as_json()), flush=True)
                check(f"{backend}: another checkpoint differs", server.checksums() != want)
                print(json.dumps(session.push(str(first)).as_json()), flush=True)
                compare(f"{backend}: per tensor, second sync", server, want, tokens)
            push(server, second, buffer_size=1 << 30)
            if backend == "streamer":
                kill_mid_broadcast(server, second)
            push(server, first, buffer_size=64 << 20)
            compare(f"{backend}: packed 64 MiB, new session", server, want, tokens)
            if arguments.reference:
                for mode in ([], ["--packed"]):
                    for _ in range(2):
                        begun = time.monotonic()
                        subprocess.run(
                            [sys.executable, arguments.reference, "--url", server.url]
                            + ["--checkpoint", str(first), *mode],
                            timeout=120,
                            check=False,
                            stdout=subprocess.DEVNULL,
                        )
                        print(f"reference {mode} {time.monotonic() - begun:.2f} s", flush=True)
                compare(f"{backend}: after the reference script", server, want, tokens)
    finally:
        for server in everyone:
            server.stop()
    print(f"{len(failures)} failed" if failures else "all good", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
