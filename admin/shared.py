"""One answer for everybody who looks: made at most once in a while, whoever asks and how often.

However many pages follow the server, what they all show is asked for and worked out once. Used from
the pages' threads.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What `make` gave last, made anew where it is older than `every_s`.

    While one thread makes it, the others have what was made before; only where there is nothing yet
    they wait. What `make` raises goes to the thread that called it, and to nobody else.
    """

    def __init__(
        self,
        make: Callable[[], T],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[T] | None = None
        self._made_s = 0.0

    def get(self) -> T:
        """Fresh enough, or as fresh as there is."""
        made = self._made
        if made is not None and self._clock() - self._made_s < self._every_s:
            return made[0]
        if not self._lock.acquire(blocking=made is None):
            assert made is not None
            return made[0]
        try:
            if self._made is None or self._clock() - self._made_s >= self._every_s:
                self._made = (self._make(),)
                self._made_s = self._clock()
            return self._made[0]
        finally:
            self._lock.release()
