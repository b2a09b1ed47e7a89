"""The verb that looks at a model before it is registered: what it is, what it takes, or why not.

Runs the registering subprocess with --check (engine/registration/main.py): a hub's configuration
and list of files are fetched, nothing large is, and no row is made in the catalog. It takes some
seconds, most of them imports.
"""

import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext
from admin.context.registration_files import is_hub
from admin.operations.models import place_of
from admin.registration import register_process
from admin.registration.register_process import REGISTER_COMMAND, RegisterEvent
from registry import locks

TIMEOUT_S = 60.0
LOCK_TIMEOUT_S = 10.0
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Preflight:
    """`found` where it could be seen; `code` and `reason` where it would be refused. `ready`: what
    was asked for is here already and takes nothing."""

    place: str
    found: RegisterEvent | None = None
    commit: str = ""
    code: str = ""
    reason: str = ""
    ready: bool = False


@operation("models.write")
def look(
    context: OperatorContext,
    source: str,
    dtype: str,
    revision: str,
    stopping: Callable[[], bool] = lambda: False,
    command: Sequence[str] = REGISTER_COMMAND,
    report: Callable[[str], None] = lambda phase: None,
) -> Preflight:
    """Raises RegistryError where the request itself makes no sense. Given up when `stopping`.
    `report` is called with each phase that begins (PHASES)."""
    place = place_of(source, revision, dtype)
    hub = is_hub(place)
    name = f"{place}@{revision or register_process.DEFAULT_REVISION}" if hub else place
    options = register_process.options(context.settings, context.data_dir, dtype)
    options += ["--check", "--hub" if hub else "--source", name]
    report("start")
    lock_path = context.data_dir / locks.PACKS_LOCK
    with (
        locks.hold(lock_path, shared=True, timeout_s=LOCK_TIMEOUT_S) as lock,
        tempfile.TemporaryFile() as errors,
        register_process.started([*command, *options], context.settings, errors, lock) as process,
    ):
        events = _events(process, stopping, report)
    return _preflight(place, events)


def _events(
    process: subprocess.Popen[bytes], stopping: Callable[[], bool], report: Callable[[str], None]
) -> list[RegisterEvent]:
    arriving, reader = register_process.read_events(process)
    events: list[RegisterEvent] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s and not stopping():
        try:
            event = arriving.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        if event is None:
            break
        events.append(event)
        if event.event == "progress":
            report(event.phase)
    register_process.stop(process)
    reader.join()
    return events


def _preflight(place: str, events: Sequence[RegisterEvent]) -> Preflight:
    found = next((event for event in events if event.event == "preflight"), None)
    ready = next((event for event in events if event.event == "ready"), None)
    commit = next((event.commit for event in events if event.event == "resolved"), "")
    refused = next((event for event in events if event.event == "refused"), None)
    if refused is not None:
        return Preflight(place, found, commit, refused.code, refused.message)
    if found is None and ready is None:
        reason = "the check took too long: try again, or register the model without it"
        return Preflight(place, None, commit, "no_answer", reason)
    return Preflight(place, found or ready, commit, ready=ready is not None)
