"""The other end of the wire."""
