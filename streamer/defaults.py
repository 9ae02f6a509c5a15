"""What a push does unless it is told otherwise: apart, for the help of the command line shows it
and need not wait for torch. Measured: docs/measurements.md."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_BUFFER_SIZE = 256 * MIB
DEFAULT_CALL_SIZE = 16 << 30
"""A failed call of ``/update_weights`` ends after at most this many bytes have been sent."""
DEFAULT_NUM_BUFFERS = 2
DEFAULT_THREADS = 12
