"""The ledger as the pipeline uses it: usage is posted exactly once (stage 10).

    open   awaited before a request's first token leaves the gateway
    post   awaited at its end; afterwards, and only then, the worker is told to forget the usage
    void   its end where nothing is owed (refused or failed before any token)

All three are queued at the call and written even if the caller is cancelled while waiting. The
request's id is the key, so repeating any of them changes nothing. Writing is ledger_writer.py's.

Recovery. Records still open at a start were left by a server that died (one server per data
folder holds the lock). Workers that outlived it send their unacknowledged finishes again at Hello:

    a Finish arrives within ledger_recovery_wait_s   posted as `disconnected`, billed by its usage:
                                                     the connection ended, up to there it was served
    a Finish with reason error arrives, or none      posted as `failed` at no cost

so every request that may have produced tokens has one posting, and a doubt costs the client
nothing. A model that is no longer hosted has no price left: such records cost nothing either.
Choices of one request finish one by one; what has arrived by the end of the wait is summed up.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from sqlalchemy import Engine

from engine.protocol import Finish
from gateway.errors import UNAVAILABLE, ApiError
from gateway.joint import base_id, joint_usage
from gateway.ledger_writer import LedgerStopped, LedgerWriter, Record, Void
from gateway.policy.pricing import TokenPrices, cost_nanos
from gateway.services import LedgerSnapshot
from gateway.settings import Settings
from gateway.types import HostedModel, Outcome
from registry import ledger as tables
from registry.ledger import OpenRecord, Posting
from registry.session import reading

logger = logging.getLogger(__name__)

RECOVERED_KIND = "recovered"
BUSY_WAIT_S = 5.0
"""What a client is told to wait where the write buffer is full."""
FREE = TokenPrices(0, 0, 0)


def is_unserved(finish: Finish) -> bool:
    """It is our failure, or nothing was done for it: the client pays nothing."""
    if finish.reason == "refused":  # after tokens that is the client's own form of answer
        return not finish.usage.generated_tokens
    return finish.reason in ("error", "timeout")


def prices_of(model: HostedModel) -> TokenPrices:
    """The prices a request of this model is billed at."""
    return TokenPrices(
        model.price_prompt_nanos, model.price_cached_nanos, model.price_completion_nanos
    )


class Ledger:
    """Implements services.UsageLedger.

    `find_model(name)` gives current prices for recovered records; `on_durable(request_ids)` is
    called on the event loop after their postings or voids are durable; `on_recovered(posting)` is
    told what an earlier server's requests used, when it is written.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        find_model: Callable[[str], HostedModel | None],
        on_durable: Callable[[Sequence[str]], None],
        wall_clock: Callable[[], float] = time.time,
        on_recovered: Callable[[Posting], None] = lambda posting: None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._find_model = find_model
        self._on_durable = on_durable
        self._wall_clock = wall_clock
        self._on_recovered = on_recovered
        self._writer = LedgerWriter(
            engine, settings.ledger_flush_interval_s, settings.ledger_max_batch
        )
        self._left: dict[str, OpenRecord] = {}
        self._parts: dict[str, dict[str, Finish]] = {}
        self._recovery: asyncio.Task[None] | None = None
        self._num_recovered = 0

    async def start(self) -> None:
        """Begin to write, and to close what an earlier server left open."""
        self._writer.start()
        left = await asyncio.to_thread(self._read_left)
        self._left = {record.request_id: record for record in left}
        if self._left:
            logger.warning("ledger recovers records=%d left open by another run", len(self._left))
            self._recovery = asyncio.create_task(self._recover(), name="ledger-recovery")

    async def stop(self, timeout_s: float) -> bool:
        """Write what is queued. False if the database did not take it in time.

        Recovery that has not ended is left to the next start.
        """
        if self._recovery is not None:
            self._recovery.cancel()
        written = await asyncio.to_thread(self._writer.stop, timeout_s)
        if not written:
            logger.error("ledger closed with records not written; a restart closes them")
        return written

    async def open(self, record: OpenRecord) -> None:
        """Durable on return. Raises ApiError(UNAVAILABLE) where the write buffer is full, or where
        the database takes longer than `ledger_open_timeout_s`; then the record is voided.

        Whoever was cancelled here ends it by `post` or `void` all the same.
        """
        if self._writer.num_pending >= self._settings.ledger_max_pending:
            raise _behind()
        written = self._write(record)
        try:
            async with asyncio.timeout(self._settings.ledger_open_timeout_s):
                await asyncio.shield(written)
        except TimeoutError as error:
            self._write(Void(record.request_id))
            raise _behind() from error
        except LedgerStopped as error:
            raise _behind() from error

    async def post(self, posting: Posting) -> None:
        """Post once by request_id; durable on return, and only then the worker forgets it."""
        await self._write(posting, posting.request_id)

    async def void(self, request_id: str) -> None:
        """Close an open record for which nothing is owed; durable on return."""
        await self._write(Void(request_id), request_id)

    def claim(self, request_id: str, finish: Finish) -> bool:
        """A worker told the end of a request that nobody here waits for.

        True if its record was left open: then it is posted, and `on_durable` will name it.
        """
        owner = base_id(request_id)
        if owner not in self._left:
            return False
        if owner == request_id:
            self._close(self._left.pop(owner), finish)
        else:
            self._parts.setdefault(owner, {})[request_id] = finish
        return True

    async def recovered(self) -> None:
        """Returns once all that was left open has been handed to the writer."""
        if self._recovery is not None:
            await asyncio.wait([self._recovery])

    def snapshot(self) -> LedgerSnapshot:
        """Figures for metrics."""
        counts = self._writer.counts
        return LedgerSnapshot(
            num_pending=self._writer.num_pending,
            lag_s=self._writer.lag_s,
            num_opened=counts.opened,
            num_posted=counts.posted,
            num_voided=counts.voided,
            num_write_errors=counts.write_errors,
            num_recovered=self._num_recovered,
        )

    async def check_integrity(self) -> None:
        """Raises registry.errors.RegistryError if a request is both open and posted."""
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        with reading(self._engine) as session:
            tables.check_integrity(session)

    def _read_left(self) -> list[OpenRecord]:
        with reading(self._engine) as session:
            return tables.open_left(session)

    def _write(self, record: Record, ends: str | None = None) -> asyncio.Future[None]:
        """Queue now; the future is done once the record is durable. `ends`: the request it ends."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(partial(self._settle, future, error, ends))

        try:
            self._writer.put(record, done)
        except LedgerStopped as error:
            self._settle(future, error, None)
        return future

    def _settle(
        self, future: asyncio.Future[None], error: BaseException | None, ends: str | None
    ) -> None:
        if error is None and ends is not None:
            self._on_durable([ends])
        if error is not None:
            logger.error("ledger record was not written: %s", error)
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # Logged above; a caller that was cancelled never asks for it.

    async def _recover(self) -> None:
        await asyncio.sleep(self._settings.ledger_recovery_wait_s)
        for record in list(self._left.values()):
            del self._left[record.request_id]
            parts = self._parts.pop(record.request_id, {})
            self._close(record, together(list(parts.values())))

    def _close(self, record: OpenRecord, finish: Finish | None) -> None:
        posting = closing(record, finish, self._find_model(record.model), self._wall_clock())
        self._num_recovered += 1
        self._on_recovered(posting)
        self._write(posting, posting.request_id)


def together(finishes: Sequence[Finish]) -> Finish | None:
    """The finishes of a request's choices as one; None where there are none."""
    if not finishes:
        return None
    usage = joint_usage([finish.usage for finish in finishes])
    failed = any(is_unserved(finish) for finish in finishes)
    return Finish("error" if failed else finishes[0].reason, usage)


def closing(
    record: OpenRecord, finish: Finish | None, model: HostedModel | None, posted_at: float
) -> Posting:
    """The posting of a record that an earlier server left open.

    An encoder's answer goes out whole, behind its posting: where there is none, neither went.
    """
    usage = None if finish is None else finish.usage
    prompt_tokens = record.prompt_tokens if usage is None else usage.prompt_tokens
    cached_tokens = 0 if usage is None else usage.cached_tokens
    completion_tokens = 0 if usage is None else usage.generated_tokens
    served = finish is not None and not is_unserved(finish) and completion_tokens > 0
    prices = FREE if model is None else prices_of(model)
    outcome: Outcome = "disconnected" if served else "failed"
    return Posting(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        key_id=record.key_id,
        model=record.model,
        revision=record.revision,
        kind=RECOVERED_KIND,
        outcome=outcome,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        cost_nanos=cost_nanos(prices, outcome, prompt_tokens, cached_tokens, completion_tokens),
        service_s=0.0 if usage is None else usage.service_s,
        queue_s=0.0,
        ttft_s=0.0,
        duration_s=0.0,
        posted_at=posted_at,
    )


def _behind() -> ApiError:
    message = "the usage ledger is behind and takes nothing new: try again later"
    return ApiError(UNAVAILABLE, message, retry_after_s=BUSY_WAIT_S)
