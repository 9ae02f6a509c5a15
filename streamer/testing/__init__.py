"""Tools for testing plugins and this library itself: none of them needs pytest to be imported."""

from streamer.testing.loopback import LoopbackGroup, LoopbackTransport
from streamer.testing.suite import SourceSuite

__all__ = ["LoopbackGroup", "LoopbackTransport", "SourceSuite"]
