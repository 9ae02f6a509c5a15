"""An option that there is not is told with what was meant."""

from __future__ import annotations

import re

import pytest

import streamer
from streamer import UsageError
from streamer.options import ConnectOptions

ALL = "there are " + ", ".join(sorted(ConnectOptions.__annotations__))


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("bufer_size", "did you mean buffer_size?; "),
        ("timeout", "give timeouts=streamer.Timeouts(total=...); "),
        ("weight_version", "give session.push(source, weight_version=...); "),
        ("api_key", 'give headers={"Authorization": "Bearer KEY"}; '),
        ("xyzzy", ""),
    ],
)
def test_an_option_that_there_is_not(option, hint):
    said = re.escape(f"there is no option {option}: {hint}{ALL}")
    with pytest.raises(UsageError, match=f"^{said}$"):
        streamer.connect("http://127.0.0.1:9", **{option: 5})


def test_several_of_them():
    with pytest.raises(UsageError) as caught:
        streamer.connect("http://127.0.0.1:9", timeout=5, threds=3)
    assert str(caught.value) == (
        "there is no option threds, timeout: did you mean threads?; "
        f"give timeouts=streamer.Timeouts(total=...); {ALL}"
    )
