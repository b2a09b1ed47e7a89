"""Threads in which pages read the database and render, with a bound on those that wait for one."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TooBusy(Exception):
    """As many wait for a thread as may."""


class Threads:
    """`num_threads` work, `max_waiting` more may wait."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"admin-{name}")
        self._max = num_threads + max_waiting
        self._num = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the work returns or raises. Raises TooBusy at once."""
        with self._lock:
            if self._num >= self._max:
                raise TooBusy
            self._num += 1
        future = self._executor.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._leave())  # also where nobody awaits it any more
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """What runs ends, what waits is given up."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _leave(self) -> None:
        with self._lock:
            self._num -= 1
