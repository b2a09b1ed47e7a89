"""The workers and the queue as the dispatcher tells them, whichever process it is in.

Asked over the operator's socket (gateway/dispatch/fleet_told.py), as `polyhost why` asks, once for
all pages of this process. Where the dispatcher does not answer (it has just died, and another one
takes over) there is nothing to tell for a moment: None, never figures of before.
"""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from admin.live_state import LiveState
from admin.shared import Shared
from gateway.cli.operator_client import ask_raw
from gateway.dispatch.fleet_told import Fleet, decode
from gateway.services import DispatcherSnapshot
from registry.errors import RegistryError

logger = logging.getLogger(__name__)

EVERY_S = 1.0
TIMEOUT_S = 1.0
"""A page's thread waits so long for a dispatcher that hangs; once in EVERY_S, not once a page."""
_NOBODY = DispatcherSnapshot(0, 0, {}, {}, {}, {}, 0, 0, 0, 0, 0, 0, {})


class _Answer(msgspec.Struct):
    fleet: bytes | None = None
    error: str = ""


_answers = msgspec.json.Decoder(_Answer)


class FleetWatch:
    """Of one data folder."""

    def __init__(self, data_path: Path, every_s: float = EVERY_S) -> None:
        self._data_path = data_path
        self._told = Shared(self._ask, every_s)

    def look(self) -> Fleet | None:
        """As of now, or of up to EVERY_S ago. In a thread."""
        return self._told.get()

    def complete(self, state: LiveState) -> LiveState:
        """What a gateway process that is one of several cannot know of itself."""
        fleet = self.look()
        if fleet is None:
            return replace(state, workers=[], dispatcher=_NOBODY)
        workers = [worker.status for worker in fleet.workers]
        return replace(state, workers=workers, dispatcher=fleet.dispatcher)

    def _ask(self) -> Fleet | None:
        try:
            answer = _answers.decode(ask_raw(self._data_path, TIMEOUT_S, ask="fleet"))
            return None if answer.fleet is None else decode(answer.fleet)
        except (RegistryError, OSError, msgspec.DecodeError) as error:
            logger.info("the dispatcher tells nothing of its workers: %s", error)
            return None
