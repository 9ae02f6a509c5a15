"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from streamer import UsageError
from streamer.sizes import count, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1),
        ("1048576", 1 << 20),
        ("64 b", 64),
        ("256KiB", 256 << 10),
        ("64MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("2 TiB", 2 << 40),
        (" 1.5gib ", 3 << 29),
        ("0.5KiB", 512),
        ("64MB", 64_000_000),
        ("1.25 kB", 1250),
    ],
)
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text, "--buffer-size") == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "0MiB", "-1", "+1", "1.5", "0.3KiB", "MiB", "64M", "12Mb9", "1e9", "nan", "inf"),
        *("1 2", "\uff11", "0x10", "9" * 5000, "1,024", "1\n2"),
    ],
)
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--buffer-size: .* is not a size.*256MiB"):
        parse_size(text, "--buffer-size")


@pytest.mark.parametrize("text", ["1", " 32 ", "1048575"])
def test_a_unit_that_was_forgotten_is_asked_for(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--size")
    number = text.strip()
    assert str(caught.value) == (
        f"--size: {number} would be bytes: give a unit, as in {number}MiB, or {number}B if that is "
        "meant"
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_600, "1.00 MB"),
        (16_381_470_720, "16.4 GB"),
        (3 * 10**12, "3.00 TB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_a_size_is_shown_in_three_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_things_are_counted() -> None:
    assert [count(n, "tensor") for n in (0, 1, 2, 1234)] == [
        "0 tensors",
        "1 tensor",
        "2 tensors",
        "1,234 tensors",
    ]
