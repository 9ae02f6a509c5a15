"""What the tests of HTTP have in common."""

from __future__ import annotations

import threading
import traceback

from streamer import StreamerError

SECRET = "s3cr3t-t0ken"


def shown(error: BaseException) -> str:
    """All that a user may get to see of an error: itself, its causes, its traceback."""
    return "".join(traceback.format_exception(error)) + repr(error)


def in_thread(call):
    errors: list[BaseException] = []

    def run():
        try:
            call()
        except StreamerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors
