"""What operators see of the server: its traffic, fair shares, health, settings and audit log, and a
search over models, tenants and keys.

What a tenant is due is its weight's part among those who asked in the same time. A tenant that asks
for less gets less, which wrongs nobody; one that waits and gets less is what the page on fairness
is for. The order itself is gateway/dispatch/policy/fair_share.py's.
"""

import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import msgspec

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext
from admin.context.policy import permissions
from admin.context.policy.permissions import Verb
from gateway.ipc.control_socket import ask
from gateway.redis.registry_pubsub import RegistryPubsub
from gateway.settings.config import SECRETS, sources_of
from gateway.settings.settings import settings_reference
from registry import audit, schema
from registry.audit import AuditEntry, AuditFilter
from registry.lists import search as finding
from registry.money import invoices, recent, rollups
from registry.money import usage as usage_sums
from registry.money.recent import MAX_ENDED, MAX_SERVED
from registry.money.rollups import DAY_S
from registry.money.usage import UsageFilter
from registry.paging import Cut

RATE_S = 60.0
TTFT_S = 300.0
DEFAULT: Final = "default"
_PLAIN: Final = frozenset({"password_users", "tls_key_file"})
"""Whose names sound like a secret's: names of users, of a file."""
_SOUNDS_SECRET: Final = re.compile(r"(password|secret|token|credential|key)(_|$)|_url$")
WINDOW_S = 900.0
TOLERANCE = 0.1
"""Of the share due: less is not called over or under."""
UNDER_S = 5.0
MAX_TEXT_LEN = 128
MIN_SETTING_LEN = 3
"""Of a search that looks at settings too: their names are full of short words."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rates a second over the last `rate_s` seconds: less than RATE_S where there are more postings
    than are looked at. Times to the first token over `ttft_span_s`; None: there was none."""

    rate_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    num_ended: int
    ttft_span_s: float
    num_ttft: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    spent_today_nanos: int


@operation("usage.read")
def traffic_now(context: OperatorContext) -> Traffic:
    """Of all tenants. Raises Forbidden."""
    now_at = context.clock()
    midnight = int(now_at // DAY_S) * DAY_S
    with context.reading() as session:
        rows = recent.ended(session, now_at - TTFT_S)
        today = usage_sums.total(session, UsageFilter(midnight, midnight + DAY_S))
    seen_s = now_at - rows[-1].posted_at if len(rows) == MAX_ENDED else TTFT_S
    rate_s = max(1.0, min(RATE_S, seen_s))
    lately = [row for row in rows if row.posted_at >= now_at - rate_s]
    times = sorted(row.ttft_s for row in rows if row.ttft_s > 0 and row.outcome != "cache_hit")
    return Traffic(
        rate_s=rate_s,
        requests_per_s=len(lately) / rate_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in lately) / rate_s,
        completion_tokens_per_s=sum(row.completion_tokens for row in lately) / rate_s,
        num_ended=len(lately),
        ttft_span_s=max(1.0, seen_s),
        num_ttft=len(times),
        ttft_p50_s=quantile(times, 0.5),
        ttft_p99_s=quantile(times, 0.99),
        spent_today_nanos=today.cost_nanos,
    )


@operation("usage.read", "tenants.read", "models.read", "audit.read")
def may_watch(context: OperatorContext) -> None:
    """Raises Forbidden unless who acts may see traffic, queues and models of all tenants."""


@operation("tenants.read")
def tenant_names(context: OperatorContext, tenant_ids: list[str]) -> dict[str, str]:
    """Names by id, of those that there are. Raises Forbidden."""
    with context.reading() as session:
        return {each.tenant_id: each.name for each in recent.weights(session, tenant_ids)}


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """`answer_s`: how long a small question took. `num_behind`: postings not in the roll-ups.
    `redis_s`: as `answer_s`; None where it does not answer, or there is none."""

    backend: str
    schema: str
    answer_s: float
    num_behind: int
    redis_s: float | None


@operation("models.read")
def database_health(context: OperatorContext) -> DatabaseHealth:
    """Asks it something. Raises what a database that does not answer raises."""
    with context.reading() as session:
        began_s = time.monotonic()
        revision = schema.applied(session.connection()) or "none"
        answer_s = time.monotonic() - began_s
        behind = rollups.state(session).num_behind
    url, redis_s = context.settings.redis_url, None
    if url:
        redis_s = RegistryPubsub(url, context.settings.redis_prefix).answer_s()
    return DatabaseHealth(context.engine.dialect.name, revision, answer_s, behind, redis_s)


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting as it holds in this process. `value` and `default` as they stand in
    polyhost.toml; of a secret, only whether it is set."""

    name: str
    env: str
    value: str
    default: str
    source: str
    description: str
    is_secret: bool
    group: str

    @property
    def is_set(self) -> bool:
        """Whether it is not the default."""
        return self.source != DEFAULT


@operation("models.write")
def settings_view(context: OperatorContext, text: str = "") -> list[SettingView]:
    """All settings of whose name or description `text` is a part; those that were set first."""
    settings, wanted = context.settings, text.strip().lower()
    sources = sources_of(settings)
    found = []
    for row in settings_reference():
        if wanted not in f"{row.name} {row.description}".lower():
            continue
        value = getattr(settings, row.name)
        secret = is_secret(row.name, value)
        shown = ("set" if value else "not set") if secret else _text(value)
        default = "not set" if secret else _text(row.default)
        source = sources.get(row.name, DEFAULT)
        found.append(
            SettingView(
                row.name, row.env, shown, default, source, row.description, secret, row.group
            )
        )
    return sorted(found, key=lambda one: not one.is_set)


def is_secret(name: str, value: object) -> bool:
    """Whether it may hold what only the server is to know."""
    if name in SECRETS:
        return True
    if not isinstance(value, str) or name in _PLAIN:
        return False
    if "://" in value:  # an address: of a user, with a password, or with a query
        return re.search("[@?]", value) is not None
    return _SOUNDS_SECRET.search(name) is not None


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


@operation("audit.read")
def list_audit(
    context: OperatorContext, wanted: AuditFilter, before_id: int | None = None, limit: int = 100
) -> list[AuditEntry]:
    """Changes, newest first; `before_id` is the last entry of the page before."""
    with context.reading() as session:
        return audit.page(session, wanted, before_id=before_id, limit=limit)


class DecisionView(msgspec.Struct, frozen=True):
    """One decision of the running server, said `count` times between `at` and `last_at`. Instants
    in epoch seconds; `figures` as in DecisionFigures, `until_s` an instant too. `candidates`: the
    models in memory when another needed room, with the `outcome` of each. `workers`: where a model
    could have been loaded, the chosen worker first (dispatch/policy/fleet_view.py, LoadOption)."""

    at: float
    last_at: float
    count: int
    kind: str
    reason: str
    model: str
    worker: str
    tenant_id: str
    figures: dict[str, float]
    detail: str
    candidates: list[dict[str, Any]]
    workers: list[dict[str, Any]] = []


class Decided(msgspec.Struct, frozen=True):
    """The latest decisions, the newest first, as of `at`; `counts`: by kind and reason, since the
    server started."""

    at: float
    decisions: list[DecisionView]
    counts: list[dict[str, Any]]


@operation("models.read", "tenants.read")
def decisions(context: OperatorContext, model: str = "", limit: int = 100) -> Decided:
    """`model` "": about all. Raises RegistryError where no server runs."""
    return msgspec.convert(
        ask(context.data_dir, ask="decisions", model=model, limit=limit), Decided
    )


@operation("audit.read")
def audit_names(context: OperatorContext, ids: Collection[str]) -> dict[str, str]:
    """What tenants and keys of these ids are called; other ids are not there."""
    with context.reading() as session:
        tenants = {each: each for each in ids if each.startswith("ten_")}
        found = {**usage_sums.names(session, "tenant", tenants)} if tenants else {}
        for key_id, name, tenant in finding.key_titles(session, ids):
            found[key_id] = f"{name} of {tenant}"
    return found


@dataclass(frozen=True, slots=True)
class ShareLine:
    """One tenant. Shares are parts of all service in the window; times in seconds, None: nothing
    ended."""

    tenant_id: str
    name: str
    weight: float
    num_waiting: int
    num_ended: int
    service_s: float
    got: float
    due: float
    wait_p50_s: float | None
    wait_p99_s: float | None
    standing: Literal["even", "over", "under", "asks for less"]


@dataclass(frozen=True, slots=True)
class Shares:
    """`since_at`: where the window begins; later than WINDOW_S ago where there are more postings
    than are looked at."""

    since_at: float
    num_ended: int
    lines: list[ShareLine]


@operation("tenants.read", "usage.read")
def fair_shares(
    context: OperatorContext, waiting: Mapping[str, int], waited_s: Mapping[str, float]
) -> Shares:
    """The tenants that asked lately or wait now, those with the most service first.

    `waiting`: requests in the queue by tenant id, `waited_s`: how long the oldest of them has
    waited, as the dispatcher says. A tenant is under its share only where it has waited for
    UNDER_S, now or in half of its requests. Raises Forbidden.
    """
    since_at = context.clock() - WINDOW_S
    with context.reading() as session:
        rows = recent.served(session, since_at)
        ids = sorted({row.tenant_id for row in rows} | {t for t, n in waiting.items() if n})
        known = recent.weights(session, ids)
    if len(rows) == MAX_SERVED:
        since_at = rows[-1].posted_at
    service_s: dict[str, float] = defaultdict(float)
    waits: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        service_s[row.tenant_id] += row.service_s
        waits[row.tenant_id].append(row.queue_s)
    total_s = sum(service_s[each.tenant_id] for each in known)
    total_weight = sum(each.weight for each in known)
    lines = []
    for each in known:
        got = service_s[each.tenant_id] / total_s if total_s else 0.0
        due = each.weight / total_weight if total_weight else 0.0
        num_waiting = waiting.get(each.tenant_id, 0)
        times = sorted(waits[each.tenant_id])
        lines.append(
            ShareLine(
                each.tenant_id,
                each.name,
                each.weight,
                num_waiting,
                len(times),
                service_s[each.tenant_id],
                got,
                due,
                quantile(times, 0.5),
                quantile(times, 0.99),
                _standing(
                    got,
                    due,
                    bool(num_waiting)
                    and max(waited_s.get(each.tenant_id, 0.0), quantile(times, 0.5) or 0.0)
                    >= UNDER_S,
                    bool(total_s),
                ),
            )
        )
    lines.sort(key=lambda line: (-line.service_s, -line.num_waiting, line.name))
    return Shares(since_at, len(rows), lines)


def quantile(rising: list[float], part: float) -> float | None:
    """The smallest value that at least this part of all does not exceed; None of nothing."""
    if not rising:
        return None
    return rising[max(0, min(len(rising) - 1, -int(-part * len(rising) // 1) - 1))]


def _standing(
    got: float, due: float, waits: bool, any_service: bool
) -> Literal["even", "over", "under", "asks for less"]:
    if not any_service or abs(got - due) <= TOLERANCE * due:
        return "even"
    if got > due:
        return "over"
    return "under" if waits else "asks for less"


@dataclass(frozen=True, slots=True)
class Found:
    """A thing. `ref` is what operations call it; `hint` tells it from others of its name."""

    kind: Literal["model", "tenant", "key", "user", "invoice", "setting"]
    ref: str
    name: str
    hint: str


@operation(on="own")
def search(context: OperatorContext, text: str, limit: int = 6) -> list[Found]:
    """At most `limit` of each kind; none for an empty text."""
    text = text.strip()[:MAX_TEXT_LEN]
    if not text:
        return []
    found: list[Found] = []
    with context.reading() as session:
        if permissions.allowed(context.grants, "models.read"):
            rows = finding.models(session, text, limit)
            found += [Found("model", name, name, state) for name, state in rows]
        seen = _seen(context, "tenants.read")
        if seen is None or seen:
            of_tenants = finding.tenants(session, text, limit, seen)
            found += [Found("tenant", tenant_id, name, "") for tenant_id, name in of_tenants]
        seen = _seen(context, "keys.read")
        if seen is None or seen:
            for key_id, public_id, name, tenant in finding.keys(session, text, limit, seen):
                found.append(Found("key", key_id, name, f"{public_id} of {tenant}"))
        seen = _seen(context, "users.read")
        if seen is None or seen:
            names = finding.users(session, text, limit, seen)
            found += [Found("user", name, name, "") for name in names]
        seen = _seen(context, "usage.read")
        if seen is None or seen:
            issued = invoices.page(session, seen, text, Cut(limit, descending=True))[0]
            found += [Found("invoice", i.number, i.number, i.tenant_name) for i in issued.rows]
    if permissions.allowed(context.grants, "models.write") and len(text) >= MIN_SETTING_LEN:
        rows_of = (row for row in settings_reference() if text.lower() in row.name)
        found += [Found("setting", r.name, r.name, r.env) for r in islice(rows_of, limit)]
    return found


def _seen(context: OperatorContext, verb: Verb) -> frozenset[str] | None:
    return permissions.tenants_allowed(context.grants, verb)
