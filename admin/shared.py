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
    they wait. What `make` raises goes to the thread that called it, and to those who come while the
    next tries again: what was before is not shown as if it were of now.
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
        self._failed: Exception | None = None  # since then

    def get(self) -> T:
        """Fresh enough, or as fresh as there is."""
        made, failed = self._made, self._failed
        if made is not None and failed is None and self._is_fresh():
            return made[0]
        if not self._lock.acquire(blocking=made is None and failed is None):
            if failed is not None:
                raise failed.with_traceback(None)
            assert made is not None
            return made[0]
        try:
            if self._made is None or self._failed is not None or not self._is_fresh():
                self._made = (self._make(),)
                self._made_s, self._failed = self._clock(), None
            return self._made[0]
        except Exception as error:  # told again to whoever comes while it is tried again
            self._failed = error
            raise
        finally:
            self._lock.release()

    def _is_fresh(self) -> bool:
        return self._clock() - self._made_s < self._every_s
