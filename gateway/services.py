"""What the HTTP edge is given when it is built: the handles a request needs on its way.

`supervisor.serve` builds one `Services` and passes it to `app.create_app(services)`. The protocols
say what the edge may rely on, so that its tests need no worker and no database. What belongs to the
edge alone (limiter, cache, pipeline, its own metrics) is built by `create_app`; metrics are
registered with `metrics_registry`, which /metrics renders.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry

from engine.protocol import SwapRecord, WorkerStatus
from gateway.cache.embed_worker import EmbeddingWorker
from gateway.directory import Directory
from gateway.settings import Settings
from gateway.store.base import LimitStore
from gateway.store.memory import MemoryStore
from gateway.types import (
    HostedModel,
    ModelOutlook,
    PreparedRequest,
    Principal,
    RunningRequest,
)
from registry.ledger import OpenRecord, Posting


@dataclass(frozen=True, slots=True)
class Accounts:
    """Who has had the devices' time since the start, of requests that have ended."""

    device_s: Mapping[str, float] = field(default_factory=dict)
    """By tenant: seconds of steps."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """By tenant: what loads have cost it, less what others have paid back."""
    failed_s: float = 0.0
    """The system's: steps for attempts that came to nothing or that nobody waited for."""
    system_load_s: float = 0.0
    """The system's: loads that no tenant's work waited for."""
    num_unsound: int = 0
    """Figures of workers that were no times, and were taken for nothing."""


@dataclass(frozen=True, slots=True)
class DispatcherSnapshot:
    """The dispatcher's figures at one moment, for metrics and the operator's pages."""

    num_waiting: int
    num_running: int
    waiting_by_model: Mapping[str, int]
    running_by_model: Mapping[str, int]
    waiting_by_tenant: Mapping[str, int]
    service_s_by_tenant: Mapping[str, float]
    """Service of each tenant's ended requests since the start (never falls)."""
    num_queue_rejections: int
    num_queue_timeouts: int
    num_retries: int
    """Requests sent a second time after their worker died."""
    num_clients_too_slow: int
    """Requests aborted because nobody read their tokens."""
    num_workers_lost: int
    num_late_messages: int
    """Deltas of earlier attempts or epochs that were dropped."""
    quarantined: Mapping[str, str]
    """Model name -> why it is not served."""
    num_load_refusals: int = 0
    """Requests refused early: their model could not be there in time."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """kind/reason -> how many (decisions.py)."""
    load_eta_s: Mapping[str, float] = field(default_factory=dict)
    """Models that somebody waits for and that are not there -> seconds until they are."""
    accounts: Accounts = field(default_factory=Accounts)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """The ledger's figures at one moment."""

    num_pending: int
    """Records that the database does not have yet."""
    lag_s: float
    """Age of the oldest of them; 0 when there is none."""
    num_opened: int
    num_posted: int
    num_voided: int
    num_write_errors: int
    num_recovered: int
    """Records an earlier process left open and this one closed."""
    num_unsynced: int = 0
    """Records that are not durable yet."""
    num_open: int = 0
    journal_bytes: int = 0
    refuses: bool = False
    """Whether nothing new is opened now."""
    num_sync_errors: int = 0
    num_damaged: int = 0
    num_put_aside: int = 0
    num_rolled: int = 0
    """Postings added to roll-ups."""


class RequestDispatcher(Protocol):
    """The fair queue in front of the workers (`gateway/dispatch/dispatcher.py`)."""

    @property
    def ready(self) -> bool:
        """A request could be served now: a worker answers and the gateway is not stopping."""

    @property
    def stopping(self) -> bool:
        """Nothing new is taken, and what runs is to come to an end."""

    def run(self, request: PreparedRequest, principal: Principal) -> RunningRequest:
        """Queue a request. Raises ApiError at once: QUEUE_FULL (with retry_after_s) where a bound
        bites, MODEL_FAILED, MODEL_NOT_FOUND, UNAVAILABLE while stopping."""

    def snapshot(self) -> DispatcherSnapshot:
        """Figures for metrics."""

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last status of each worker that is connected."""

    def model_failure(self, model_name: str) -> str | None:
        """Why a hosted model cannot be served now (quarantine, failed load); None if it can."""

    def model_outlook(self, model_name: str) -> ModelOutlook:
        """Where a hosted model is, and how soon it could answer."""

    def add_swap_listener(self, listener: Callable[[str, SwapRecord], None]) -> None:
        """Call `listener(worker_id, record)` once for every finished load or eviction."""


class LedgerFigures(Protocol):
    """Whoever can tell how a ledger stands."""

    def snapshot(self) -> LedgerSnapshot:
        """Figures for metrics."""


class UsageLedger(LedgerFigures, Protocol):
    """Durable usage (`gateway/ledger/`). All are safe to repeat with the same request_id."""

    def open(self, record: OpenRecord) -> Awaitable[None]:
        """Queued at the call, durable when awaited. Raises ApiError(UNAVAILABLE) there where
        nothing new is taken."""

    def checkpoint(self, request_id: str, streamed_tokens: int) -> None:
        """The client of an open request has been sent so much of its stream."""

    def post(self, posting: Posting) -> Awaitable[None]:
        """Post once by request_id. Awaited, it survives a kill; and a power cut, where the request
        was not opened. Once it survives that, too, the worker may forget it."""

    def void(self, request_id: str) -> Awaitable[None]:
        """Close an open record for which nothing is owed; as `post`."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything the edge may use. Built once; the parts change inside, never the references."""

    settings: Settings
    directory: Directory
    """Keys, tenants' limits and hosted models, kept fresh by the supervisor's registry poll."""
    dispatcher: RequestDispatcher
    ledger: UsageLedger
    metrics_registry: CollectorRegistry
    limit_store: LimitStore = field(default_factory=MemoryStore)
    """Counts of limits; the registry poll fills in what a restart has lost."""
    embedding_worker: EmbeddingWorker | None = None
    """Of the model `cache_embedder`; None where the server is set up without."""
    cache_socket: Path | None = None
    """Where the operator asks about cached answers; None: nowhere."""
    scrape: Callable[[], Awaitable[bytes]] | None = None
    """What /metrics answers where this process is one of several; None: `metrics_registry`."""


__all__ = [
    "Directory",
    "DispatcherSnapshot",
    "HostedModel",
    "LedgerSnapshot",
    "RequestDispatcher",
    "Services",
    "Settings",
    "UsageLedger",
]
