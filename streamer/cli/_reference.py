"""A reference server in processes of its own, for commands that need something to push to."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator

from streamer.exceptions import DeadlineExceeded, StreamerError

_START_SECONDS = 60.0
_END_SECONDS = 5.0
_URL = re.compile(r"http://\S+:\d+(?=,)")


class StartingServer:
    """A server that may still be starting. `url` waits until it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def url(self) -> str:
        """Raises `StreamerError` if the server ends, or is not ready within a minute."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _START_SECONDS)[0]:
            raise DeadlineExceeded(f"the reference server was not ready in {_START_SECONDS:g} s")
        match = _URL.search(self._process.stdout.readline())
        if match is None:
            raise StreamerError(f"the reference server ended with code {self._process.wait()}")
        return match[0]


@contextlib.contextmanager
def reference_server(*arguments: str) -> Iterator[StartingServer]:
    """Start ``streamer serve`` on a free port, with more ``arguments``; end it with the block.

    It also ends if this process is killed, and is out of the reach of the terminal's Ctrl-C.
    """
    command = [sys.executable, "-m", "streamer", "serve", "--port", "0", "--until-eof"]
    # The key of another server must not close this one to its own command.
    env = {name: value for name, value in os.environ.items() if name != "STREAMER_API_KEY"}
    with subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            yield StartingServer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
