"""What a push does unless it is told otherwise, as measured: docs/measurements.md.

Free of torch, so that the help of the command line is there at once.
"""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_BUFFER_SIZE = 256 * MIB
DEFAULT_CALL_SIZE = 16 << 30
"""A call of ``/update_weights`` ends with the chunk that makes it larger. One that has failed is
sent to its end, with filler."""
DEFAULT_NUM_BUFFERS = 2
DEFAULT_THREADS = 12
