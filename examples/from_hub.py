"""Push a model of the Hugging Face Hub into a running server, and only if it does not serve it yet.

    python examples/from_hub.py Qwen/Qwen3-8B --to http://localhost:8000

Run it again, from a timer for one: while the revision points to the same commit nothing is sent.
With --no-cache the bytes go from the Hub into the broadcast, and nothing is written to disk.
"""

from __future__ import annotations

import argparse

import streamer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="org/name, or org/name@revision")
    parser.add_argument("--to", required=True)
    parser.add_argument("--no-cache", action="store_true")
    arguments = parser.parse_args()

    source = streamer.open_source(f"hf://{arguments.model}", no_cache=arguments.no_cache)
    try:
        report = streamer.push(source, to=arguments.to)
    finally:
        source.close()
    if report.tensors:
        print(f"{report.tensors} tensors sent: the server serves commit {report.weight_version}")
    else:
        print(f"the server serves commit {report.weight_version} already")


if __name__ == "__main__":
    main()
