"""Files on their way into the cache, in a process of their own: `streamer_huggingface.worker`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from streamer.exceptions import SourceError
from streamer_huggingface import worker
from streamer_huggingface.retry import ToldWaits
from streamer_huggingface.target import Target

_STOP_SECONDS = 2.0


class Downloads:
    """Downloads ``files``, in this order, ``at_once`` at a time, from the moment it is made.

    `close` stops what is under way; nothing is left of it but complete files.
    """

    def __init__(
        self, target: Target, commit: str, files: Sequence[str], cache_dir: str, at_once: int
    ) -> None:
        self._target = target
        self._turn = threading.Condition()
        self._paths: dict[str, Path] = {}
        self._errors: dict[str, SourceError] = {}
        self._ended = False
        self._told = ToldWaits()
        job = worker.Job(
            sys_path=sys.path,
            repo=target.path.repo,
            commit=commit,
            files=list(files),
            cache_dir=cache_dir,
            endpoint=target.endpoint,
            token=target.token_or_false,
            at_once=at_once,
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                start_new_session=True,  # Ctrl-C is for this process, which stops that one
            )
        except OSError as error:
            raise SourceError(f"cannot start a process to download: {error.strerror}") from error
        self._thread = threading.Thread(target=self._listen, name="streamer-hub", daemon=True)
        self._thread.start()
        self._tell(json.dumps(job))

    def wait(self, file: str) -> Path:
        """Where ``file`` is, once it is complete. Raises `SourceError` if it will not be."""
        with self._turn:
            self._turn.wait_for(lambda: file in self._paths or file in self._errors or self._ended)
            if file in self._paths:
                return self._paths[file]
            if file in self._errors:
                raise self._errors[file]
        raise self._target.error(
            f"{file}: the process that downloads has ended", "look at its own messages above"
        )

    def progress(self) -> int:
        """See `ToldWaits.progress`."""
        return self._told.progress()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "waits" in answer:
                self._told.add(answer["waits"])
                continue
            file = answer["file"]
            with self._turn:
                if "path" in answer:
                    self._paths[file] = Path(answer["path"])
                else:
                    failure = worker.Failure(**answer["failure"])
                    self._errors[file] = self._target.failed(failure, file)
                self._turn.notify_all()
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: `wait` says so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Stop the downloads. Whoever waits for a file gets a `SourceError`. Idempotent."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        # A line, because the end of the pipe is only seen when no fork of this process has it.
        self._tell("stop")
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
