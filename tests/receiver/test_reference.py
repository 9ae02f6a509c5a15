"""What the reference server refuses: each time with a 4xx, and it goes on as before."""

from __future__ import annotations

from typing import Any

import pytest
import requests

pytestmark = pytest.mark.timeout(60)

HALF = b'"\\ud800"'
DEEP = b"[" * 200_000 + b"]" * 200_000


def sent(server: Any, path: str, body: bytes) -> tuple[int, str]:
    """Status and message of the answer to these bytes."""
    answer = requests.post(server.url + path, data=body, timeout=20)
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("version", [HALF, b'"\xed\xa0\x80"'], ids=["escaped", "as it is"])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/update_weight_version", "new_version"), ("/finish_weight_update", "weight_version")],
)
def test_a_version_that_is_no_text_is_not_stored(
    server: Any, path: str, field: str, version: bytes
) -> None:
    server.post("/start_weight_update")
    status, message = sent(server, path, b'{"%s":%s}' % (field.encode(), version))
    assert (status, message) == (400, f"{field!r} holds half a surrogate pair")
    assert server.weight_version == "default"
    server.post("/finish_weight_update", {"weight_version": "whole \U0001f600"})
    assert server.weight_version == "whole \U0001f600"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/update_weight_version", "new_version"),
        ("/init_weight_transfer_engine", "init_info"),
        ("/update_weights", "update_info"),
    ],
)
def test_a_body_that_is_nested_too_deeply(server: Any, path: str, field: str) -> None:
    status, message = sent(server, path, b'{"%s":%s}' % (field.encode(), DEEP))
    assert (status, message) == (400, "the body is nested too deeply")
    assert server.weight_version == "default"
