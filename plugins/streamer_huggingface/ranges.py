"""Files of a repository at one commit, read by range requests, several at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import quote, urlsplit

import requests
import urllib3
from streamer_safetensors.untrusted import MAX_JSON_SIZE, shown

from streamer.exceptions import SourceError
from streamer_huggingface.retry import Retries, ToldWaits
from streamer_huggingface.target import Target
from streamer_huggingface.web import Refused, Span, Web
from streamer_huggingface.worker import Failure, describe, of_response

HEAD_SIZE = 64
"""Bytes that are read at the opening: no more than the shortest header of a tensor."""
_PIECE = 1 << 20
_SKIPPED = 1 << 20
"""Bytes that are read in vain, at most, of a server that knows no ranges."""
_SHORT = "the connection ended early"
_EXPIRED = (401, 403, 404, 410)
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


class RemoteFile:
    """A file behind range requests. ``size`` and ``head``, its first bytes, came with the first
    answer. Every later answer must be of the same file: size, ETag and commit are compared.
    """

    def __init__(self, client: RangeClient, name: str) -> None:
        """Asks nothing yet: see `RangeClient.open`."""
        self.name = name
        self.size = 0
        self.head = b""
        self.location: str | None = None
        """Where the Hub redirected to, until that expires."""
        self._seen = {"commit": client.commit}
        self._client = client

    def __str__(self) -> str:
        return shown(self.name)

    def read(self, start: int, size: int) -> bytes:
        """See `WeightFile.read`."""
        if start + size <= len(self.head):
            return self.head[start : start + size]
        data = bytearray(size)
        self.read_into(memoryview(data), start, "the header")
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, what: str) -> None:
        """See `WeightFile.read_into`. One request, and more only if it breaks."""
        self._client.fetch(self, start, buffer, what)

    def compare(self, what: str, value: str | None) -> None:
        """Hold what an answer says, if it says so, against what earlier ones said."""
        if value and self._seen.setdefault(what, value) != value:
            raise self._client.target.error(
                f"{self} was changed while it was read: its {what} was {shown(self._seen[what])} "
                f"and is {shown(value)}",
                "open the source again",
            )


class RangeClient:
    """Makes the requests: at most ``connections`` at once, each tried again if it breaks.

    Thread-safe; starts no threads.
    """

    def __init__(self, target: Target, commit: str, connections: int) -> None:
        self.target = target
        self.commit = commit
        self._web = Web(target, connections)
        self._slots = threading.Semaphore(connections)
        self._closed = threading.Event()
        self.received = 0
        """Bytes of weights that have come in: about so many, as no thread waits to count them."""
        self._told = ToldWaits()
        self._live: set[urllib3.BaseHTTPResponse] = set()

    def progress(self) -> int:
        """See `WeightSource.progress`. It grows also while we wait as long as we were told to."""
        return self.received + self._told.progress()

    def open(self, name: str) -> RemoteFile:
        """A file, of which the size and the first bytes are known. Raises `SourceError`."""
        file = RemoteFile(self, name)
        retries = Retries(self._closed, self._told)
        while True:
            try:
                with self._answer(file, (0, HEAD_SIZE)) as body:
                    file.head = body.read(min(HEAD_SIZE, file.size), decode_content=False)
                if len(file.head) == min(HEAD_SIZE, file.size):
                    return file
                raise urllib3.exceptions.ProtocolError(_SHORT)
            except Exception as error:
                self._try_again(retries, error, file, "the header")

    def whole(self, name: str) -> bytes:
        """The content of a small file. Raises `SourceError`."""
        file = RemoteFile(self, name)
        retries = Retries(self._closed, self._told)
        while True:
            try:
                with closing(self._ask(file, None)) as response:
                    data: bytes = response.raw.read(MAX_JSON_SIZE + 1, decode_content=True)
                    if len(data) > MAX_JSON_SIZE:
                        raise self.target.error(
                            f"{file} is longer than the {MAX_JSON_SIZE} bytes that are allowed",
                            "take another revision",
                        )
                    if response.raw.length_remaining:
                        raise urllib3.exceptions.ProtocolError(_SHORT)
                    return data
            except Exception as error:
                self._try_again(retries, error, file, "the file")

    def fetch(self, file: RemoteFile, start: int, buffer: memoryview, what: str) -> None:
        """Fill ``buffer`` with the bytes of ``file`` from ``start`` on.

        A request that breaks is made again for the bytes that are still missing. Raises
        `SourceError` that names the model, or ``what`` if the client was closed.
        """
        retries = Retries(self._closed, self._told)
        done = 0
        while done < len(buffer):
            before = done
            try:
                with self._answer(file, (start + done, start + len(buffer))) as body:
                    while done < len(buffer):
                        limit = min(_PIECE, len(buffer) - done)
                        data = body.read1(limit, decode_content=False)
                        if not data:
                            raise urllib3.exceptions.ProtocolError(_SHORT)
                        buffer[done : done + len(data)] = data
                        done += len(data)
                        self.received += len(data)
            except Exception as error:
                if done - before >= _PIECE:
                    retries.progress()
                self._try_again(retries, error, file, what)

    def _try_again(self, retries: Retries, error: Exception, file: RemoteFile, what: str) -> None:
        """Return if that may help, when it is time to; raise a `SourceError` otherwise."""
        if isinstance(error, SourceError):
            raise error
        failure = error.failure if isinstance(error, Refused) else describe(error)
        if not self._closed.is_set() and retries.again(failure):
            return
        if self._closed.is_set():
            raise SourceError(f"cannot read {what} from {file}: the source was closed") from error
        raise self.target.failed(failure, file.name) from error

    @contextmanager
    def _answer(self, file: RemoteFile, span: Span) -> Iterator[urllib3.BaseHTTPResponse]:
        """A body that starts where ``span`` does and ends where it does, or later."""
        while not self._slots.acquire(timeout=0.5):
            self._check_open()
        try:
            self._check_open()
            with closing(self._ask(file, span)) as response:
                skip = self._check(file, response, span[0])
                body: urllib3.BaseHTTPResponse = response.raw
                self._live.add(body)
                try:
                    self._check_open()
                    if skip:
                        body.read(skip, decode_content=False)
                    yield body
                finally:
                    self._live.discard(body)
        finally:
            self._slots.release()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Refused(Failure(reason="closed", network=True))

    def _ask(self, file: RemoteFile, span: Span | None) -> requests.Response:
        """Ask where the file was last, or else the Hub."""
        hub = f"{self.target.endpoint}/{self.target.path.repo}/resolve/{self.commit}/"
        *redirects, response = self._web.get(file.location or hub + quote(file.name), span)
        with ExitStack() as stack:
            stack.callback(response.close)
            for each in (*redirects, response):
                file.compare("commit", each.headers.get("X-Repo-Commit"))
                file.compare("size", each.headers.get("X-Linked-Size"))
                file.compare("linked ETag", each.headers.get("X-Linked-ETag"))
            if response.status_code in (200, 206) or _is_empty(response):
                file.location = response.url
                stack.pop_all()
                return response
            total = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code == 416 and total is not None:
                file.compare("size", total[2])
            if response.status_code in _EXPIRED and not self._web.is_hub(response.url):
                # The link has a date; the Hub gives a new one.
                file.location = None
                said = "from where the Hub stores it"
                raise Refused(Failure(response.status_code, text=said, transient=True))
            raise Refused(of_response(response))

    def _check(self, file: RemoteFile, response: requests.Response, start: int) -> int:
        """Make sure that it answers the question; return how many bytes come too early."""
        headers = response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(Failure(reason="the answer is compressed, which was not asked for"))
        found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if response.status_code == 200:
            first, total = 0, int(headers.get("Content-Length", -1))
        elif found is None or int(found[1] or start) != start:
            raise Refused(Failure(reason="the answer is not the range that was asked for"))
        else:
            first, total = start, int(found[2])
        if total < 0 or start - first > _SKIPPED:
            reason = "the server does not answer range requests: hf download, and push the folder"
            raise Refused(Failure(reason=reason))
        file.compare("size", str(total))
        file.size = total
        etag = headers.get("ETag", "").removeprefix("W/")
        file.compare(f"ETag at {urlsplit(response.url).hostname}", etag)
        return start - first

    def close(self) -> None:
        """End the requests under way; whoever waits for one gets a `SourceError`. Idempotent."""
        self._closed.set()
        for body in list(self._live):
            with suppress(ValueError, RuntimeError, OSError):  # it has ended by itself
                body.shutdown()
        self._web.close()


def _is_empty(response: requests.Response) -> bool:
    """An empty file has no range that could be asked for."""
    return response.status_code == 416 and response.headers.get("Content-Range") == "bytes */0"
