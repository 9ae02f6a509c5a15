"""A digest of the bytes that pass through a broadcast group: equal bytes, equal digest, any device.

It has to cost much less than the broadcast, on every rank. So bytes are taken as 64-bit words in
rows of `WORDS`, and of each piece torch sums every row and every column, modulo 2^64: two reading
passes, no copy, and integers, so that the order in which a device adds does not matter. Any change
of up to three words of a piece changes a sum for certain, and so does any exchange of two; what
else happens by accident does so with overwhelming probability. It is no defence against somebody
who makes up bytes to fit. The sums, a thousandth of the data, are then hashed with their positions.
"""

from __future__ import annotations

import ctypes
import time

import torch

WORDS = 1024
"""64-bit words in a row: 8 KiB."""
SMALL = 1 << 20
"""Bytes below which pieces are collected first: a sum of a few bytes costs as much as of many."""
COLLECTED = 4 << 20
"""Bytes that are collected before they are summed."""

_ROW = 8 * WORDS
_BLOCK = 31 * _ROW
"""Bytes that a CPU sums at once: the second pass finds them in its cache, and torch does not split
them over threads, as it does from 32 Ki numbers on. Those would wait for each other, busily, on
cores that are busy with broadcasting."""
_COPIED = 64 << 20
"""Bytes that are copied at once where they start between words."""
_ODD = 0x9E3779B97F4A7C15


class StreamDigest:
    """The digest of the tensors that were `add`-ed, one after another, on one device.

    Two are equal if the same bytes were added in pieces of the same sizes. On CUDA everything is
    enqueued on the current stream, which must be the same for every call, and nothing waits for it;
    the tensor must stay as it is until that stream has passed `add`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._sums: list[torch.Tensor] = []
        self._collected: torch.Tensor | None = None
        self._filled = 0
        self._sizes = 0
        self._seconds = 0.0
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Take in the bytes of a contiguous ``tensor`` of any dtype."""
        if tensor.numel() == 0:
            return
        started = self._now()
        data = tensor.detach().view(-1).view(torch.uint8)
        self._sizes = (self._sizes * _ODD + data.numel()) % (1 << 64)
        whole = data.numel() // _ROW * _ROW if data.numel() >= SMALL else 0
        if whole:
            self._sum(data[:whole])
        if whole < data.numel():
            self._collect(data[whole:])
        self._spent(started)

    def _collect(self, data: torch.Tensor) -> None:
        if self._collected is None:
            self._collected = torch.empty(COLLECTED, dtype=torch.uint8, device=self._device)
        if self._filled + data.numel() > COLLECTED:
            self._sum_collected()
        if self._cuda:
            self._collected[self._filled : self._filled + data.numel()].copy_(data)
        else:  # not split over threads either
            target = self._collected.data_ptr() + self._filled
            ctypes.memmove(target, data.data_ptr(), data.numel())
        self._filled += data.numel()

    def _sum_collected(self) -> None:
        if self._collected is None or not self._filled:
            return
        end = -(-self._filled // _ROW) * _ROW
        self._collected[self._filled : end].zero_()
        self._sum(self._collected[:end])
        self._filled = 0

    def _sum(self, data: torch.Tensor) -> None:
        """Keep the sums of whole rows."""
        aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
        step = _BLOCK if not self._cuda else data.numel() if aligned else _COPIED
        parts = _rows(data).split(step // _ROW) if aligned else map(_copied, data.split(step))
        rows = torch.empty(data.numel() // _ROW, dtype=torch.int64, device=self._device)
        columns: torch.Tensor | None = None
        for part, out in zip(parts, rows.split(step // _ROW), strict=True):
            torch.sum(part, 1, out=out)
            total = part.sum(0)
            columns = total if columns is None else columns.add_(total)
        assert columns is not None
        self._sums += [rows, columns]

    def hexdigest(self) -> str:
        """16 hexadecimal digits. Waits for the device: call it once the stream has been waited for.

        Nothing can be added afterwards.
        """
        started = self._now()
        self._sum_collected()
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        place = 1
        if self._sums:
            sums = torch.cat(self._sums)
            for part in sums.split(sums.numel() if self._cuda else _BLOCK // 8):
                places = torch.arange(place, place + part.numel(), device=self._device)
                total += _mix(_mix(places).bitwise_xor_(part)).sum()
                place += part.numel()
        value = int(total) + self._sizes
        self._sums, self._collected = [], None
        self._spent(started)
        return f"{value % (1 << 64):016x}"

    @property
    def seconds(self) -> float:
        """What all of this has cost. Asked for after `hexdigest`."""
        return self._seconds + sum(_elapsed(*pair) for pair in self._timed)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _spent(self, started: float | torch.cuda.Event) -> None:
        now = self._now()
        if isinstance(now, float) and isinstance(started, float):
            self._seconds += now - started
        elif isinstance(now, torch.cuda.Event) and isinstance(started, torch.cuda.Event):
            self._timed.append((started, now))


def _rows(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int64).view(-1, WORDS)


def _copied(data: torch.Tensor) -> torch.Tensor:
    return _rows(data.clone())


def _elapsed(started: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1e3


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Scramble 64-bit words in place, each to another one: the finalizer of splitmix64."""
    words ^= _shifted(words, 30)
    words *= _signed(0xBF58476D1CE4E5B9)
    words ^= _shifted(words, 27)
    words *= _signed(0x94D049BB133111EB)
    words ^= _shifted(words, 31)
    return words


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """``words`` shifted right as unsigned numbers, which torch's int64 are not."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
