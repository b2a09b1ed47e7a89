"""Looking at a model before it is registered: what it is, what it takes, or why not.

`look` is the verb of the pages: the registering subprocess with --check
(engine/registration/main.py). `inspect` and `search_hub` are the command line's, and need no
database: the same process with --inspect or --search, which uses a temporary folder. A hub's small
files are fetched, nothing large is, and no row is made in the catalog. Each takes some seconds,
most of them imports.
"""

import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext
from admin.context.registration_files import CRASHED, is_hub
from admin.operations.models import place_of
from admin.registration import register_process
from admin.registration.register_process import (
    INTERNAL_ERROR,
    REGISTER_COMMAND,
    HubModel,
    RegisterEvent,
)
from gateway.settings.settings import Settings
from registry import locks
from registry.errors import InvalidValue, RegistryError

TIMEOUT_S = 60.0
INSPECT_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 10.0
NO_ANSWER = "no_answer"
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Preflight:
    """`found` where it could be seen; `code` and `reason` where it would be refused.

    ready         what was asked for is here already and takes nothing
    hub           what the hub says of it
    described     what its config.json calls it
    parity_error  where an inspection has probed it
    """

    place: str
    found: RegisterEvent | None = None
    commit: str = ""
    code: str = ""
    reason: str = ""
    ready: bool = False
    hub: HubModel | None = None
    described: RegisterEvent | None = None
    parity_error: float | None = None


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


def inspect(
    settings: Settings,
    source: str,
    revision: str = "",
    command: Sequence[str] = REGISTER_COMMAND,
    report: Callable[[str], None] = lambda phase: None,
) -> Preflight:
    """What a folder or hub id is, and whether it could be hosted, whatever is on this machine.

    Raises InvalidValue where the source makes no sense.
    """
    repo, at, named = source.rpartition("@")
    if at and not Path(source).expanduser().exists():
        if revision:
            raise InvalidValue(f"{source} names a revision already: leave out --revision")
        source, revision = repo, named
    place = place_of(source, revision, "auto")
    hub = is_hub(place)
    name = f"{place}@{revision or register_process.DEFAULT_REVISION}" if hub else place
    events = _apart(settings, ["--inspect", "--hub" if hub else "--source", name], command, report)
    return _preflight(place, events)


def search_hub(
    settings: Settings,
    words: str,
    limit: int,
    author: str = "",
    task: str = "",
    command: Sequence[str] = REGISTER_COMMAND,
) -> list[RegisterEvent]:
    """The models found, most downloads first. Raises RegistryError where a hub gives no answer."""
    asked = [f"--search={words}", "--limit", str(limit), f"--author={author}", f"--task={task}"]
    events = _apart(settings, asked, command, lambda phase: None)
    refused = next((event for event in events if event.event == "refused"), None)
    if refused is not None:
        raise RegistryError(f"{refused.message} ({refused.code})")
    return [event for event in events if event.event == "found" and event.hub]


def _apart(
    settings: Settings, asked: Sequence[str], command: Sequence[str], report: Callable[[str], None]
) -> list[RegisterEvent]:
    """All that the process says, in a folder of its own. What crashes it is a refusal."""
    report("start")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        options = register_process.options(settings, Path(folder), "auto")
        with register_process.started([*command, *options, *asked], settings, errors) as process:
            events = _events(process, lambda: False, report, INSPECT_TIMEOUT_S)
        refused = next((event for event in events if event.event == "refused"), None)
        if refused is None and process.returncode != 0:
            words = register_process.last_words(errors) or f"exit status {process.returncode}"
            refused = RegisterEvent("refused", "", code=CRASHED, message=f"it crashed: {words}")
            events.append(refused)
        is_bug = refused is not None and refused.code in (CRASHED, INTERNAL_ERROR)
        if is_bug and settings.data_path.is_dir():
            register_process.keep_log(errors, settings.data_path)
    return events


def _events(
    process: subprocess.Popen[bytes],
    stopping: Callable[[], bool],
    report: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> list[RegisterEvent]:
    arriving, reader = register_process.read_events(process)
    events: list[RegisterEvent] = []
    deadline_s = time.monotonic() + timeout_s
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
    else:
        text = "the check took too long: try again, or register the model without it"
        events.append(RegisterEvent("refused", "", code=NO_ANSWER, message=text))
    register_process.stop(process)
    reader.join()
    return events


def _preflight(place: str, events: Sequence[RegisterEvent]) -> Preflight:
    by_name = {event.event: event for event in events}
    found, ready = by_name.get("preflight"), by_name.get("ready")
    resolved, checked = by_name.get("resolved"), by_name.get("checked")
    seen = Preflight(
        place,
        found or ready,
        commit=resolved.commit if resolved else "",
        ready=ready is not None,
        hub=resolved.hub if resolved else None,
        described=by_name.get("described"),
        parity_error=checked.parity_error if checked else None,
    )
    refused = by_name.get("refused")
    if refused is not None:
        return replace(seen, code=refused.code, reason=refused.message)
    if ready is None and checked is None:
        return replace(seen, code=NO_ANSWER, reason="the check ended early: try again")
    return seen
