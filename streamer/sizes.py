"""Sizes in bytes, and times, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

from streamer.exceptions import UsageError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_SMALLEST = 1 << 20
"""Bytes: the least that a number without a unit is taken for."""
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_size(text: str, option: str) -> int:
    """Bytes in ``text``: ``256MiB``, ``1.5 GiB``, ``64MB``, or a bare number of bytes.

    Raises `UsageError` naming ``option`` if it is not a whole number of bytes, and at least one, or
    so few without a unit that one was forgotten.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = Fraction(match[1]) * unit if match and unit else Fraction(0)
    if size < 1 or size.denominator != 1:
        raise UsageError(
            f"{option}: {text!r} is not a size: give a number of bytes, or one with KiB, MiB or "
            "GiB, as in 256MiB"
        )
    if match and not match[2] and size < _SMALLEST:
        raise UsageError(
            f"{option}: {match[1]} would be bytes: give a unit, as in {match[1]}MiB, or "
            f"{match[1]}B if that is meant"
        )
    return int(size)


def format_size(nbytes: int) -> str:
    """``nbytes`` in three digits: ``16.4 GB``. Units are powers of 1000, as in GB/s."""
    if nbytes < 1000:
        return "1 byte" if nbytes == 1 else f"{nbytes} bytes"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``1,234 tensors``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
