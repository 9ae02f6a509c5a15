"""Run the reference script unchanged and print, as JSON, when it loaded, connected and updated.

    python benchmarks/reference_timer.py rlhf_http_nccl_no_vllm.py --url ... --checkpoint ...

Phases are taken from the calls that the script makes: ``load`` from its first ``load_file`` to its
first HTTP call, ``connect`` from ``/get_world_size`` to ``/start_weight_update``, ``update`` from
there to the end of ``/finish_weight_update``.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from typing import Any

import requests
import safetensors.torch

marks: dict[str, float] = {}


def mark(name: str) -> None:
    marks.setdefault(name, time.perf_counter())


def main() -> None:
    script, sys.argv = sys.argv[1], sys.argv[1:]
    load_file, request = safetensors.torch.load_file, requests.Session.request

    def timed_load_file(*args: Any, **kwargs: Any) -> Any:
        mark("load")
        return load_file(*args, **kwargs)

    def timed_request(self: requests.Session, method: str, url: str, *args: Any, **kw: Any) -> Any:
        path = "/" + url.split("://")[1].partition("/")[2]
        mark("first call")
        mark(f"before {path}")
        try:
            return request(self, method, url, *args, **kw)
        finally:
            mark(f"after {path}")

    safetensors.torch.load_file = timed_load_file
    requests.Session.request = timed_request  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")
    begin, end = "before /start_weight_update", "after /finish_weight_update"
    seconds = {
        "load": marks["first call"] - marks["load"],
        "connect": marks[begin] - marks["before /get_world_size"],
        "update": marks[end] - marks[begin],
    }
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
