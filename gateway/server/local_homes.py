"""The homes of this machine's workers: what starts their processes, and starts them again.

    run (all of them, until `stop`) -> on_exit(worker_id, reason, cause) at each end
    set_weights, restart, kill

Between what a server wants to run (worker_slots.py) and one process (child_process.py). Whoever
puts a server together knows only this: the workers' names and endpoints, and how a process of them
ended. Which worker gets which request or model is the dispatcher's. The embedding model's worker
has its home here too, and no dispatcher.
"""

import asyncio
import logging
import subprocess
from collections.abc import Callable, Collection, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.exc import SQLAlchemyError

from admin.context.operator_context import open_context
from admin.live.workers import list_workers, order_workers
from gateway.ipc import machine
from gateway.server.child_process import WORKER_COMMAND, WORKER_STOP_TIMEOUT_S, EarlyWorker
from gateway.server.worker_launcher import (
    EmbedderLauncher,
    WorkerGuard,
    WorkerLauncher,
    clear_host_tier,
    main_memory,
)
from gateway.server.worker_slots import Machine, NoSuchWorkers, WorkerSlot, plan_slots
from gateway.settings.config import worker_environment
from gateway.settings.settings import Settings
from gateway.workers.worker_client import LossCause
from registry.errors import RegistryError

logger = logging.getLogger(__name__)

_ASK_S = 60.0
RENEW_LOOK_S = 1.0
ACTOR = "server"
"""Of the restarts that the server orders itself, in the audit log."""


def slots_here(settings: Settings) -> list[WorkerSlot]:
    """What the settings want of this machine. Raises NoSuchWorkers."""
    names = {settings.device, *(spec.device for spec in settings.workers)}
    gpus = _gpus() if "auto" in names and machine.may_have_gpus() else ()
    here = Machine(machine.cpu_nodes(), gpus)
    return plan_slots(settings.workers, settings.num_workers, settings.device, here)


def order_restarts(settings: Settings, names: Collection[str]) -> None:
    """Of those of these workers that are connected and have no such order yet. Where the dispatcher
    or the database is away nothing happens: try again."""
    try:
        with open_context(settings, ACTOR) as context:
            views = [view for view in list_workers(context) if view.name in names]
            outgrown = [view.name for view in views if view.started_at and not view.restarts]
            if outgrown:
                logger.info("restarting %s with a larger device budget", ", ".join(outgrown))
                order_workers(context, outgrown, "restart")
    except (RegistryError, SQLAlchemyError) as error:
        logger.info("cannot order restarts yet: %s", error)


def _gpus() -> list[str]:
    """Asked of a process with torch, which a server has not. Raises NoSuchWorkers."""
    command = [*WORKER_COMMAND[:-1], "--devices"]
    environment = worker_environment(0)
    try:
        answer = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, timeout=_ASK_S, check=True
        )
        return msgspec.json.decode(answer.stdout, type=list[str])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        text = "set device to cpu, or list the workers with their devices as [[workers]]"
        raise NoSuchWorkers(f"cannot find out which GPUs there are ({error}): {text}") from error


class LocalHomes:
    """All of them. `on_exit(worker_id, reason, cause)`, also while they are being stopped; `early`
    is child_process.py's, of the first worker."""

    def __init__(
        self,
        settings: Settings,
        slots: Sequence[WorkerSlot],
        command: Sequence[str],
        on_exit: Callable[[str, str, LossCause], None],
        registry: CollectorRegistry,
        early: EarlyWorker | None = None,
        guard: WorkerGuard | None = None,
    ) -> None:
        """`guard`: of workers that servers of other machines reach."""
        self._on_exit = on_exit
        self._have_news = asyncio.Event()
        self._is_stopping = False
        self._settings = settings
        here = [slot for slot in slots if not slot.public_key]
        clear_host_tier(settings)
        free_bytes = early.free_bytes if early else machine.free_memory_bytes()
        memory = main_memory(settings, free_bytes)
        self._workers = [
            WorkerLauncher(
                settings,
                slot,
                memory,
                command,
                self._ended,
                early.process if early and not index else None,
                guard,
            )
            for index, slot in enumerate(here)
        ]
        self._embedder = EmbedderLauncher(settings, command, self._ended)
        self._restarts = Counter(
            "polyhost_worker_restarts",
            "Worker processes that ended while the server ran and were started again.",
            ["worker"],
            registry=registry,
        )

    def set_weights(self, weights: dict[str, int]) -> None:
        """Bytes of each ready model's weights."""
        for worker in self._workers:
            worker.set_weights(weights)
        self._embedder.set_weights(weights)
        self._have_news.set()

    def restart(self, worker_id: str) -> None:
        """Let it drain, then start it anew; nothing happens where there is no such worker."""
        for worker in self._workers:
            if worker.worker_id == worker_id:
                worker.process.restart()

    def kill(self, worker_id: str) -> None:
        """End one hard that hangs; it is started again as after any other end. One of another
        machine is its home's to end."""
        for worker in self._workers:
            if worker.worker_id == worker_id:
                logger.error("worker hangs and is killed worker=%s", worker_id)
                worker.process.kill()

    async def run(self) -> None:
        """Keep all alive. Raises OSError if a process cannot be started at all."""
        processes = (self._embedder.run(), *(one.process.run() for one in self._workers))
        await asyncio.gather(self._renew(), *processes)

    async def stop(self, timeout_s: float = WORKER_STOP_TIMEOUT_S) -> None:
        """Returns when all are gone. `timeout_s`: for what still runs on them; a server has none
        left."""
        self._is_stopping = True
        processes = [self._embedder.process, *(worker.process for worker in self._workers)]
        await asyncio.gather(*(process.stop(timeout_s) for process in processes))

    async def _renew(self) -> None:
        """Workers with too small an arena begin anew, one after another and drained before: by an
        order to the dispatcher, as an operator would give it."""
        while True:
            await self._have_news.wait()
            self._have_news.clear()
            while names := [one.worker_id for one in self._workers if one.is_outgrown]:
                await asyncio.to_thread(order_restarts, self._settings, names)
                await asyncio.sleep(RENEW_LOOK_S)

    def _ended(self, worker_id: str, reason: str, cause: LossCause) -> None:
        self._on_exit(worker_id, reason, cause)
        if not self._is_stopping:
            self._restarts.labels(worker_id).inc()
