"""The workers and the queue as the dispatcher tells them, whichever process it is in.

Asked over the operator's socket (gateway/dispatch/operator_handler.py), as `polyhost why` asks,
once for all pages of this process. Where the dispatcher does not answer (it has just died, and
another one takes over) there is nothing to tell for a moment: None, never figures of before.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from engine.protocol import WorkerStatus
from gateway.dispatch.operator_handler import FleetReport, decode
from gateway.ipc.control_socket import ask_raw
from gateway.protocols import DispatcherSnapshot, LedgerSnapshot
from registry.errors import RegistryError

T = TypeVar("T")
logger = logging.getLogger(__name__)
EVERY_S = 1.0
TIMEOUT_S = 1.0
"""A page's thread waits so long for a dispatcher that hangs; once in EVERY_S, not once a page."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """The workers and the queue are of the whole server (fleet_watch.py), the ledger and the limits
    as this process has them."""

    workers: Sequence[WorkerStatus]
    dispatcher: DispatcherSnapshot
    ledger: LedgerSnapshot
    ready: bool
    limits_degraded: bool

    def states_of(self, model: str) -> dict[str, str]:
        """Where a model is, by worker; cold where a worker says nothing of it."""
        return {
            worker.worker_id: next(
                (row.state for row in worker.models if row.model_id == model), "cold"
            )
            for worker in self.workers
        }


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
        except Exception as error:  # raised for everyone until it is tried again
            self._failed = error
            raise
        finally:
            self._lock.release()

    def _is_fresh(self) -> bool:
        return self._clock() - self._made_s < self._every_s


class _Answer(msgspec.Struct):
    fleet: bytes | None = None
    error: str = ""


_answers = msgspec.json.Decoder(_Answer)


def ask_fleet(data_path: Path) -> FleetReport | None:
    """As of now; None: the server has nothing to tell. Raises RegistryError where none runs there,
    or with the reason that it gives, OSError, msgspec.DecodeError."""
    answer = _answers.decode(ask_raw(data_path, TIMEOUT_S, ask="fleet"))
    if answer.error:
        raise RegistryError(answer.error)
    return None if answer.fleet is None else decode(answer.fleet)


class FleetWatch:
    """Of one data folder."""

    def __init__(self, data_path: Path, every_s: float = EVERY_S) -> None:
        self._data_path = data_path
        self._report = Shared(self._ask, every_s)

    def look(self) -> FleetReport | None:
        """As of now, or of up to EVERY_S ago. In a thread."""
        return self._report.get()

    def complete(self, state: LiveState) -> LiveState:
        """What a gateway process that is one of several cannot know of itself."""
        fleet = self.look()
        if fleet is None:
            return replace(state, workers=[], dispatcher=DispatcherSnapshot())
        workers = [worker.status for worker in fleet.workers]
        return replace(state, workers=workers, dispatcher=fleet.dispatcher)

    def _ask(self) -> FleetReport | None:
        try:
            return ask_fleet(self._data_path)
        except (RegistryError, OSError, msgspec.DecodeError) as error:
            logger.info("cannot get worker states from the dispatcher: %s", error)
            return None
