"""The other end of the wire."""

OCCUPIED = "another trainer is in the middle of a sync here: push again when that is over"
"""Why a trainer is not let in: both syncs would come to nothing."""
