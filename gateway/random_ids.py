"""Random bytes a few at a time, from the system's in one piece: ids of requests, seeds.

Asking the system costs a call that lets go of the interpreter's lock, and in a process with other
threads at work getting that back takes longer than all the rest. Not for keys and secrets.
"""

import os
from collections.abc import Callable

_BLOCK_BYTES = 4096


class RandomBytes:
    """Used on one event loop. No byte is given out twice; a fork must not share one."""

    def __init__(self, source: Callable[[int], bytes] = os.urandom) -> None:
        self._source = source
        self._block = b""
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """So many, at most 4096."""
        end = self._at + num_bytes
        if end > len(self._block):
            self._block = self._source(_BLOCK_BYTES)
            self._at, end = 0, num_bytes
        taken = self._block[self._at : end]
        self._at = end
        return taken
