"""What a push would run into, found without changing anything on a server.

Each check is a function that gives findings; each finding that is no ``ok`` says what to do.
"""

from streamer.doctor.examine import examine
from streamer.doctor.finding import Finding

__all__ = ["Finding", "examine"]
