"""Push one checkpoint into several servers: the bytes are sent once, to all workers together.

    streamer serve --port 8000                # each in a terminal of its own:
    streamer serve --port 8001 --workers 2    # wait for its line `ready: ...`
    python examples/many_servers.py /models/Qwen3-8B --to http://localhost:8000 http://localhost:8001

All of them change together, or the error says what each one holds, and the next push cures it.
"""

from __future__ import annotations

import argparse
import sys

import streamer


def show(event: streamer.Event) -> None:
    if isinstance(event, streamer.ChunkSent):
        last = event.bytes == event.total_bytes
        print(f"\r{event.bytes / event.total_bytes:4.0%}", end="\n" * last, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--to", nargs="+", required=True)
    arguments = parser.parse_args()

    try:
        report = streamer.push(arguments.checkpoint, to=arguments.to, verify=True, on_event=show)
    except streamer.StreamerError as error:
        for url, state in error.held.items():
            print(f"{url} {state}", file=sys.stderr)
        raise
    print(f"{report.bytes / 1e6:.1f} MB in {report.seconds.total:.3f} s, sent once")
    for server in report.servers:
        print(f"{server.url}: {server.world_size} workers, arrival proven by {server.verified}")


if __name__ == "__main__":
    main()
