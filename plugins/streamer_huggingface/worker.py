"""Downloads through ``huggingface_hub``, run as a process of its own, which can always be stopped.

A download inside ``huggingface_hub`` cannot be stopped from outside: not while a server is silent,
and not inside Xet. Its process can. This file is run by its path and imports nothing of streamer,
which would load torch.

A line of JSON on stdin, a `Job`, says what to do. Each file is answered with a line on stdout, when
it is there or has failed; other lines say how long we are going to wait. One more line on stdin, or
its end, stops it: at once, with what was half written removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

_TRANSIENT = {
    "ConnectionError",
    "IncompleteRead",
    "NetworkError",
    "ProtocolError",
    "RemoteProtocolError",
    "Timeout",
    "TimeoutError",
    "TimeoutException",
}
_LASTING = {"ProxyError", "SSLError", "RequestException", "TransportError"}
"""Errors of the network, by the names of their classes in several libraries."""
_NEVER_AGAIN = {"ProxyError", "SSLError"}
_RETRIED = {408, 429, 500, 502, 503, 504}
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
_QUERY = re.compile(r"\?[^\s'\"]+")
_PARTIAL = re.compile(r"\.[0-9a-f]{8}\.incomplete$")


class Job(TypedDict):
    """What to download. ``token`` is False for none; ``sys_path`` is that of the other process."""

    sys_path: list[str]
    repo: str
    commit: str
    files: list[str]
    cache_dir: str
    endpoint: str
    token: str | bool
    at_once: int


@dataclass(frozen=True)
class Failure:
    """Why a request failed, in terms that need no library and hold no secret.

    ``code`` and ``text`` are the Hub's ``X-Error-Code`` and message; ``reason`` says what happened
    where there was no answer, on the ``network`` or here. ``transient``: it may go well the next
    time; ``retry_after`` is the seconds or the date that the server asks to wait for.
    """

    status: int | None = None
    code: str = ""
    text: str = ""
    retry_after: str = ""
    reason: str = ""
    network: bool = False
    transient: bool = False
    offline: bool = False


def describe(error: BaseException) -> Failure:
    """Why ``huggingface_hub``, ``requests`` or the system raised ``error``."""
    chain = list(_chain(error))
    names = {cls.__name__ for each in chain for cls in type(each).__mro__}
    if "OfflineModeIsEnabled" in names:
        return Failure(offline=True)
    for each in chain:
        response = getattr(each, "response", None)
        if response is not None:
            return of_response(response, getattr(each, "server_message", None))
    return Failure(
        reason=_reason(chain),
        network=bool(names & (_TRANSIENT | _LASTING)),
        transient=bool(names & _TRANSIENT) and not names & _NEVER_AGAIN,
    )


def of_response(response: Any, text: str | None = None) -> Failure:
    """What an answer says that refuses. Of ``requests`` or ``httpx``, whose names are the same."""
    headers = response.headers
    status = int(response.status_code)
    limit = _RATE_LIMIT.search(headers.get("RateLimit") or "")
    return Failure(
        status=status,
        code=headers.get("X-Error-Code") or "",
        text=(headers.get("X-Error-Message") or text or "")[:200],
        retry_after=headers.get("Retry-After") or (limit[1] if limit else ""),
        transient=status in _RETRIED,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(chain: list[BaseException]) -> str:
    for each in reversed(chain):
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    lines = str(chain[-1]).splitlines() or [""]
    return _QUERY.sub("", f"{type(chain[-1]).__name__}: {lines[0]}")


def main() -> None:
    """Do the job on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    job: Job = json.loads(sys.stdin.readline())
    sys.path[:] = job["sys_path"]
    turn = threading.Lock()

    def say(answer: dict[str, Any]) -> None:
        with turn:
            print(json.dumps(answer), file=answers, flush=True)

    _tell_waits(say)

    def download(file: str) -> None:
        answer = _download(job, file)
        if answer.get("failure", {}).get("transient"):
            answer = _download(job, file)  # not every release of huggingface_hub tries again
        say({"file": file, **answer})

    pool = ThreadPoolExecutor(job["at_once"])
    for file in job["files"]:
        pool.submit(download, file)
    sys.stdin.readline()
    _remove_partial()
    os._exit(0)


def _tell_waits(say: Callable[[dict[str, Any]], None]) -> None:
    """Tell of each wait of a second or more: ``huggingface_hub`` waits as it was told, inside."""
    plain = time.sleep

    def sleep(seconds: Any) -> None:
        if seconds >= 1:
            say({"waits": seconds})
        plain(seconds)

    time.sleep = sleep


def _download(job: Job, file: str) -> dict[str, Any]:
    """The ``path`` where the file is, or the ``failure``."""
    try:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(
            job["repo"],
            file,
            revision=job["commit"],
            cache_dir=job["cache_dir"],
            endpoint=job["endpoint"],
            token=job["token"],
            library_name="streamer",
        )
    except BaseException as error:
        return {"failure": asdict(describe(error))}
    return {"path": path}


def _remove_partial() -> None:
    """Remove what is half written under a name that no later download would take up."""
    with contextlib.suppress(OSError):  # no /proc: it stays
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{entry}")
                if _PARTIAL.search(path):
                    os.remove(path)


if __name__ == "__main__":
    main()
