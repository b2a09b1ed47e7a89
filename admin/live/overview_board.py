"""What the first page shows, worked out once for all who look at it, in this process.

    every second   the dispatcher: workers, arenas, queue, decisions (fleet_watch.py)
    every 2 s      the newest postings, and what was spent today (admin/operations/server.py)
    every 5 s      answers that failed or were refused, of all processes (rates.py)

Nothing is asked while nobody looks. What is here is of all tenants: the page asks each time whether
its user may see all (admin/operations/server.py).
"""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import FleetWatch, Shared
from admin.live.rates import Answered, Rising, answer_counts, answered
from admin.operations.models import sharing
from admin.operations.server import Traffic, tenant_names, traffic_now
from admin.rendering import arena as drawing
from admin.rendering.arena import ON_DEVICE, Arena, Band, arenas, bands
from admin.rendering.templating import Templates
from gateway.dispatch.operator_handler import FleetReport
from gateway.errors import ApiError
from gateway.pipeline.edge import Edge

logger = logging.getLogger(__name__)

PARTS = ("figures", "arenas", "legend", "hour", "waiting", "evicted", "swaps")
LOOK_S = 1.0
TRAFFIC_S = 2.0
ANSWERS_S = 5.0
ANSWERS_SPAN_S = 60.0
TOKENS_SPAN_S = 60.0
TABLES_S = 5.0
"""The table beside the picture: with a hundred models most of what the page sends."""
_SCRAPE_S = 3.0


@dataclass(frozen=True, slots=True)
class ArenaPicture:
    """One device, drawn."""

    arena: Arena
    strip: Markup
    lies: Markup


@dataclass(frozen=True, slots=True)
class OverviewFigures:
    """All of it at one moment. `fleet` None: the dispatcher does not answer. `tokens_per_s`: as
    workers count them now; None at the first look. `answers` None: nobody could say."""

    at: float
    fleet: FleetReport | None
    traffic: Traffic
    tokens_per_s: float | None
    answers: Answered | None
    pictures: list[ArenaPicture] = field(default_factory=list)
    hour: list[tuple[Band, Markup]] = field(default_factory=list)
    num_bands: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    """Tenants that wait, by id."""


class Board:
    """Used from the pages' threads; the loop is where counters are read."""

    def __init__(
        self,
        context: OperatorContext,
        templates: Templates,
        fleet: FleetWatch,
        edge: Edge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`context`: with the server's own rights."""
        self._operator = context
        self._templates = templates
        self._fleet = fleet
        self._edge = edge
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tokens = Rising(TOKENS_SPAN_S, from_zero=False)
        self._answers = Rising(ANSWERS_SPAN_S)
        self._traffic = Shared(lambda: traffic_now(context), TRAFFIC_S, clock)
        self._answered = Shared(self._ask_counts, ANSWERS_S, clock)
        self._found = Shared(self._find, LOOK_S / 2, clock)
        self._parts = Shared(self._render, LOOK_S / 2, clock)
        self._tables = Shared(lambda: self._part("tables", self._found.get()), TABLES_S, clock)

    def look(self, loop: asyncio.AbstractEventLoop) -> OverviewFigures:
        """The figures. Raises RegistryAway where the database does not answer."""
        self._loop = loop
        return self._found.get()

    def parts(self, loop: asyncio.AbstractEventLoop) -> Mapping[str, str]:
        """The page's parts as HTML, the same for everybody."""
        self._loop = loop
        return self._parts.get()

    def _render(self) -> Mapping[str, str]:
        found = self._found.get()
        parts = {part: self._part(part, found) for part in PARTS}
        return {**parts, "tables": self._tables.get()}

    def _part(self, part: str, found: OverviewFigures) -> str:
        currency = self._operator.settings.currency
        return self._templates.macro("overview_parts.html", part, found, currency)

    def _find(self) -> OverviewFigures:
        fleet, traffic = self._fleet.look(), self._traffic.get()
        at = self._operator.clock() if fleet is None else fleet.at
        if fleet is None:
            return OverviewFigures(at, None, traffic, None, self._answered.get())
        colours = self._templates.colours
        hour, num_bands = bands(fleet)
        waiting = sorted({group.tenant_id for group in fleet.waiting})
        return OverviewFigures(
            at,
            fleet,
            traffic,
            self._tokens_now(fleet),
            self._answered.get(),
            [
                ArenaPicture(each, drawing.strip(each, colours), drawing.layout(each, colours))
                for each in arenas(fleet, self._sharing(fleet))
            ],
            [(each, drawing.band(each, colours)) for each in hour],
            num_bands,
            tenant_names(self._operator, waiting) if waiting else {},
        )

    def _sharing(self, fleet: FleetReport) -> Mapping[str, list[str]]:
        """Asked where a name on a device has no pages of its own, so where it has another's."""
        owners = {key.rpartition("/")[0] for w in fleet.workers for key in w.status.pages}
        rows = [row for worker in fleet.workers for row in worker.status.models]
        here = {row.model_id for row in rows if row.state in ON_DEVICE}
        return sharing(self._operator, here) if here - owners else {}

    def _tokens_now(self, fleet: FleetReport) -> float | None:
        made = {
            worker.status.epoch: worker.status.counters.get("generation_tokens", 0.0)
            for worker in fleet.workers
        }
        span_s, added = self._tokens.since(fleet.at, made)
        return sum(added.values()) / span_s if span_s > 0 else None

    def _ask_counts(self) -> Answered | None:
        assert self._loop is not None
        asked = asyncio.run_coroutine_threadsafe(answer_counts(self._edge), self._loop)
        try:
            sums = asked.result(_SCRAPE_S)
        except (TimeoutError, concurrent.futures.CancelledError, ApiError) as error:
            asked.cancel()
            logger.info("cannot get request figures from the server's processes: %r", error)
            return None
        span_s, added = self._answers.since(self._clock(), sums)
        return answered(added, span_s) if span_s > 0 else answered(sums, None)
