"""Workers of the running server: what each does, and orders to them.

An order is a row in the registry (registry/models/worker_orders.py): the server's dispatcher reads
it and carries it out (gateway/dispatch/worker_drains.py). Who wants to know how far it is looks
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import ask_fleet
from engine.protocol import WorkerStatus
from gateway.dispatch.integrity_check import Checked
from gateway.dispatch.operator_handler import FleetReport, Worker
from gateway.ipc.control_socket import ask
from registry.errors import NotFound, RegistryError
from registry.models import worker_orders
from registry.models.worker_orders import NO_ORDER, WorkerAction, WorkerOrder

State: TypeAlias = Literal["down", "serving", "handing_over", "draining", "drained"]
ON_DEVICE: Final = ("resident", "loading", "draining")
STATES: Final[dict[State, str]] = {
    "down": "down",
    "serving": "serving",
    "handing_over": "loading its models elsewhere",
    "draining": "finishing its requests",
    "drained": "drained",
}
"""In words."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. `state`: `down` where no process of it is connected, else the dispatcher's word.
    `started_at`: of its process, epoch seconds. `num_models`: on the device. `order`: what is
    wanted of it."""

    name: str
    state: State
    device: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    num_models: int = 0
    num_running: int = 0
    free_requests: int = 0
    started_at: float = 0.0
    lost_at: float = 0.0
    labels: tuple[str, ...] = ()
    order: WorkerOrder = NO_ORDER

    @property
    def restarts(self) -> bool:
        """Whether its process is still to be replaced."""
        return self.state != "down" and self.started_at == self.order.restart_of > 0

    @property
    def is_settled(self) -> bool:
        """Whether it is as it was ordered to be."""
        wanted = "drained" if self.order.drained else "serving"
        return self.state == wanted and not self.restarts


@operation("models.read")
def list_workers(context: OperatorContext, fleet: FleetReport | None = None) -> list[WorkerView]:
    """By name. `fleet`: as it is now; None: the running server is asked. Raises RegistryError where
    none runs, or it cannot say."""
    fleet = fleet or ask_fleet(context.data_dir)
    if fleet is None:
        raise RegistryError("the dispatcher does not answer just now: try again")
    with context.reading() as session:
        orders = worker_orders.all_orders(session)
    found = [_view(worker) for worker in fleet.workers]
    here = {view.name for view in found}
    lost = {name: at for name, at in fleet.lost.items() if name not in here}
    found += [WorkerView(name, "down", lost_at=at) for name, at in lost.items()]
    views = [replace(view, order=orders.get(view.name, NO_ORDER)) for view in found]
    return sorted(views, key=lambda view: (len(view.name), view.name))


@operation("models.write", audit=("worker.drain", "worker.resume", "worker.restart"))
def order_workers(context: OperatorContext, names: Sequence[str], action: WorkerAction) -> None:
    """Have workers drained, restarted one after another, or serve again; no names: all of them.
    Raises NotFound, and RegistryError where no server runs."""
    known = {view.name: view for view in list_workers(context)}
    now_at = context.clock()
    with context.writing() as session:
        ordered = worker_orders.all_orders(session)
        for name in names:
            # What was wanted of a worker that is not configured any more can be taken back.
            if name not in known and not (action == "resume" and name in ordered):
                text = f"there is no worker {name!r}; the server has: {', '.join(known)}"
                raise NotFound(text)
        for name in names or known:
            began_at = known[name].started_at if name in known else 0.0
            worker_orders.order(session, name, action, now_at=now_at, started_at=began_at)


@dataclass(frozen=True, slots=True)
class BooksChecked:
    """Whether the books of a part of the server, or of a worker, agree. `text`: what is wrong.

    ok | broken | ended (a worker's process, before it answered) | no answer | down
    """

    name: str
    state: Checked
    text: str = ""


@operation("models.read")
def check_books(context: OperatorContext) -> list[BooksChecked]:
    """Have the running server and its workers compare their books. A worker that finds something
    ends itself and is started again. Raises RegistryError where no server runs."""
    checks = ask(context.data_dir, ask="check")["checks"]
    return [BooksChecked(name, one["state"], one["text"]) for name, one in checks.items()]


def _view(worker: Worker) -> WorkerView:
    return replace(
        connected(worker.status),
        state=worker.state,
        device=worker.layout.device if worker.layout else "",
        num_running=worker.num_running,
        labels=worker.labels,
    )


def connected(status: WorkerStatus) -> WorkerView:
    """As far as its status tells: where the dispatcher says no more."""
    return WorkerView(
        name=status.worker_id,
        state="serving",
        memory_bytes=status.num_pages * status.page_bytes,
        free_bytes=status.pages.get("free", 0) * status.page_bytes,
        num_models=sum(model.state in ON_DEVICE for model in status.models),
        num_running=sum(model.num_running for model in status.models),
        free_requests=status.free_requests,
        started_at=status.started_at,
    )
