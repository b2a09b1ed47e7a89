"""Are all books right, of this dispatcher and of its workers? Asked by an operator (stage 5).

The workers check themselves between two steps and answer with their next status. Nothing is decided
here, and nothing is changed: a worker that finds something ends by itself, as it does when it finds
it while idle.
"""

import asyncio
from typing import Literal, NamedTuple, TypeAlias

from engine.protocol import CheckIntegrity
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet

ANSWER_S = 4.0
"""Within the operator's own time-out (ipc/control_socket.py). A step rarely lasts a second."""
LOOK_S = 0.02

Checked: TypeAlias = Literal["ok", "broken", "ended", "no answer", "down"]


class CheckResult(NamedTuple):
    """Of one worker. `text`: what was found, where something was.

    broken     its books do not agree; the process ends itself
    ended      the process is gone, without an answer
    no answer  it does something else for longer than ANSWER_S, or hangs
    down       no process of it is connected
    """

    state: Checked
    text: str = ""


async def check_workers(fleet: Fleet, call: int) -> dict[str, CheckResult]:
    """By worker, of all that there are. `call`: greater than that of each check before."""
    found = {worker_id: CheckResult("down") for worker_id in fleet.worker_ids}
    # What has answered may be gone before the next look: its last words are kept here.
    asked = [one for one in fleet if fleet.send(one.worker_id, CheckIntegrity(call))]
    looks = round(ANSWER_S / LOOK_S)
    while asked and looks:
        await asyncio.sleep(LOOK_S)
        looks -= 1
        results = {one.worker_id: _result(fleet, one, call) for one in asked}
        found |= {worker_id: result for worker_id, result in results.items() if result is not None}
        asked = [one for one in asked if results[one.worker_id] is None]
    return found | {one.worker_id: CheckResult("no answer") for one in asked}


def _result(fleet: Fleet, worker: WorkerCapacity, call: int) -> CheckResult | None:
    """None: it has not answered yet."""
    checked = None if worker.status is None else worker.status.checked
    if checked is not None and checked[0] >= call:
        return CheckResult("broken" if checked[1] else "ok", checked[1])
    if fleet.get(worker.worker_id, worker.epoch) is None:
        return CheckResult("ended", "see its log")
    return None
