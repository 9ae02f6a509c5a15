"""Where a cold start of ``streamer push`` spends its time: cold.py URL CHECKPOINT TRACE

Prints the seconds since ``T0`` (a Unix time, from the environment) at each step, and the report's,
and writes a timeline of them to TRACE: its ``rendezvous`` is NCCL's own part of ``join``. What the
process takes to end is seen from outside.
"""

from __future__ import annotations

import os
import sys
import time

T0 = float(os.environ["T0"])
steps: list[str] = []


def at(step: str) -> None:
    steps.append(f"{step} {time.time() - T0:.2f}")


def main(url: str, checkpoint: str, timeline: str) -> None:
    at("python")
    from streamer.cli._ahead import begin_ahead

    begin_ahead([url], None, connect_timeout=5, headers={}, ca_bundle=None, trust_env=False)
    import torch

    at("torch")
    import streamer
    from streamer.cli import make_app

    make_app()
    at("streamer")
    trace = streamer.Trace()
    session = streamer.Session(url, trace=trace)
    at("session")
    source = streamer.open_source(checkpoint)
    at("open")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    at("context")
    session.join()
    at("join")
    report = session.push(source)
    at("push")
    session.close()
    at("close")
    trace.write(timeline)
    print(", ".join(steps), report.as_json()["seconds"], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
