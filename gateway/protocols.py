"""The seams of the gateway: what one part may rely on of another, without importing it.

The dispatcher and the ledger are reached through these by the pipeline, the metrics and the
operator's pages, so that each can be tested without a worker or a database. Snapshots are their
figures at one moment.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.protocol import SwapRecord, WorkerStatus
from gateway.types import ModelOutlook, PreparedRequest, Principal, RunningRequest
from registry.money.ledger import OpenRecord, Posting


class ConnectionCounts(Protocol):
    """What the HTTP server's connections are, for metrics."""

    @property
    def num_open(self) -> int:
        """Connections open now."""

    @property
    def num_delayed(self) -> int:
        """Connections that waited for the turn of their address, since the start."""

    @property
    def ended(self) -> Mapping[str, int]:
        """Connections that the server ended, by reason."""


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

    num_waiting: int = 0
    num_running: int = 0
    waiting_by_model: Mapping[str, int] = field(default_factory=dict)
    running_by_model: Mapping[str, int] = field(default_factory=dict)
    waiting_by_tenant: Mapping[str, int] = field(default_factory=dict)
    service_s_by_tenant: Mapping[str, float] = field(default_factory=dict)
    """Service of each tenant's ended requests since the start (never falls)."""
    num_queue_rejections: int = 0
    num_queue_timeouts: int = 0
    num_retries: int = 0
    """Requests sent again that had no token when their worker died or was emptied."""
    num_resumed: int = 0
    """The same of requests with tokens: they went on behind these."""
    num_clients_too_slow: int = 0
    """Requests aborted because nobody read their tokens."""
    num_workers_lost: int = 0
    num_late_messages: int = 0
    """Deltas of earlier attempts or epochs that were dropped."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
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
    num_differing: int = 0
    """Postings in whose place another one of their request stood, with another amount."""
    num_rolled: int = 0
    """Postings added to roll-ups."""


class DispatcherFigures(Protocol):
    """Whoever can tell how the fair queue and its workers stand."""

    @property
    def ready(self) -> bool:
        """A request could be served now: a worker answers and the gateway is not stopping."""

    def snapshot(self) -> DispatcherSnapshot:
        """Figures for metrics."""

    def worker_statuses(self) -> list[WorkerStatus]:
        """The last status of each worker that is connected."""


class RequestDispatcher(DispatcherFigures, Protocol):
    """The fair queue in front of the workers (`gateway/cluster/dispatcher_proxy.py`)."""

    @property
    def stopping(self) -> bool:
        """Nothing new is taken, and what runs is to come to an end."""

    def run(self, request: PreparedRequest, principal: Principal) -> RunningRequest:
        """Queue a request. Raises ApiError at once (MODEL_NOT_FOUND, UNAVAILABLE while stopping),
        or in place of the first event: QUEUE_FULL (with retry_after_s), MODEL_FAILED."""

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
