"""What a run of reconcile.py must have come to: clients, limits and ledger agree (pure).

Lives here: what each client saw against the postings, sums against budgets, and what is left of a
budget in tokens. Does not: servers, requests, the database.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.client import Answer
from registry.money.ledger import Posting
from tests.e2e.violence_judge import COMPLETION_NANOS, PROMPT_NANOS, cost_of

BILLED = ("finished", "disconnected")
MINUTE_S = 58.0
"""Two seconds of which may lie between an arrival and its count on a busy machine."""


@dataclass(slots=True)
class Seen(Answer):
    """What one client saw of one request. Who gave up before the answer knows no `request_id`."""

    tenant_id: str


@dataclass(frozen=True, slots=True)
class Promise:
    """A tenant's limits; 0: none. `budget_nanos` of the month, `day_tokens` of any 24 hours,
    `minute_requests` of any minute."""

    budget_nanos: int = 0
    day_tokens: int = 0
    minute_requests: int = 0


def judge(
    seen: Sequence[Seen],
    postings: Sequence[Posting],
    promises: Mapping[str, Promise],
    rate_slack: float = 1.0,
) -> list[str]:
    """What is wrong, in words. `rate_slack`: times its limit, a rate may be used; budgets never."""
    by_id = {posting.request_id: posting for posting in postings}
    wrong = [] if len(by_id) == len(postings) else ["a request was posted twice"]
    wrong += [f"{problem}: {posting}" for posting in postings for problem in _price(posting)]
    unseen = Counter(posting.tenant_id for posting in postings)
    blind: Counter[str] = Counter()
    for one in seen:
        posting = by_id.get(one.request_id) if one.request_id else None
        if posting is not None:
            unseen[one.tenant_id] -= 1
        elif not one.request_id and one.end in ("left", "error", "broken"):
            blind[one.tenant_id] += 1
        wrong += [f"{problem}: {one}: {posting}" for problem in _sight(one, posting)]
    for tenant_id, count in unseen.items():
        if not 0 <= count <= blind[tenant_id]:
            wrong.append(f"{tenant_id}: {count} postings of {blind[tenant_id]} unknown requests")
    spent = spent_nanos(postings)
    for tenant_id, promise in promises.items():
        if promise.budget_nanos and spent[tenant_id] > promise.budget_nanos:
            wrong.append(f"{tenant_id}: spent {spent[tenant_id]} of {promise.budget_nanos}")
        used = used_tokens(postings, tenant_id)
        if promise.day_tokens and used > promise.day_tokens * rate_slack:
            wrong.append(f"{tenant_id}: used {used} of {promise.day_tokens} tokens")
        most = most_in_a_minute(postings, tenant_id)
        if promise.minute_requests and most > promise.minute_requests * rate_slack:
            wrong.append(f"{tenant_id}: {most} of {promise.minute_requests} requests in a minute")
    return wrong


def most_in_a_minute(postings: Sequence[Posting], tenant_id: str) -> int:
    """Requests that count, by their arrival, which is a moment before they are counted."""
    billed = (p for p in postings if p.tenant_id == tenant_id and p.outcome in BILLED)
    arrived = sorted(posting.arrived_at for posting in billed)
    most = begin = 0
    for end, at in enumerate(arrived, 1):
        while arrived[begin] <= at - MINUTE_S:
            begin += 1
        most = max(most, end - begin)
    return most


def compare_sums(spent: Mapping[str, int], told: Mapping[str, Mapping[str, int]]) -> list[str]:
    """`told`: sums by tenant, by who says so. All have to be those of the postings."""
    return [
        f"{tenant_id}: {says} says {sums.get(tenant_id, 0)} of {spent.get(tenant_id, 0)}"
        for says, sums in told.items()
        for tenant_id in sorted({*spent, *sums})
        if sums.get(tenant_id, 0) != spent.get(tenant_id, 0)
    ]


def spent_nanos(postings: Sequence[Posting]) -> Counter[str]:
    """By tenant."""
    spent: Counter[str] = Counter()
    for posting in postings:
        spent[posting.tenant_id] += posting.cost_nanos
    return spent


def used_tokens(postings: Sequence[Posting], tenant_id: str) -> int:
    """What limits on tokens count of a tenant's."""
    return sum(
        posting.prompt_tokens + posting.completion_tokens
        for posting in postings
        if posting.tenant_id == tenant_id and posting.outcome in BILLED
    )


def affordable(left_nanos: int, prompt_tokens: int) -> int:
    """The largest `max_tokens` that a request may ask for; below 1: none."""
    return (left_nanos - prompt_tokens * PROMPT_NANOS) // COMPLETION_NANOS


def slope_mib_min(samples: Sequence[tuple[float, float]]) -> float:
    """By least squares over the second half of (seconds, MiB)."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    mean_s = sum(at_s for at_s, _ in half) / len(half)
    mean = sum(mib for _, mib in half) / len(half)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in half)
    rise = sum((at_s - mean_s) * (mib - mean) for at_s, mib in half)
    return 60.0 * rise / spread if spread else 0.0


def _price(posting: Posting) -> Iterator[str]:
    if posting.outcome not in (*BILLED, "failed"):
        yield "an outcome that cannot be"
    cost = cost_of(posting)
    if posting.cost_nanos != (cost if posting.outcome in BILLED else 0):
        yield f"should cost {cost}"


def _sight(one: Seen, posting: Posting | None) -> Iterator[str]:
    if one.end == "broken":
        yield "nobody broke a connection"
    if one.end == "refused" and posting is not None:
        yield "refused and posted"
    if posting is None:
        if one.request_id and (one.chunks or one.end == "done"):
            yield "tokens and no posting"
        return
    if posting.tenant_id != one.tenant_id:
        yield "another tenant's"
    if one.end == "done":
        told = (posting.prompt_tokens, posting.completion_tokens)
        if posting.outcome != "finished" or one.told != told:
            yield "it was told otherwise"
    if one.end == "error" and posting.outcome != "failed":
        yield "our failure"
    if one.end == "left" and posting.outcome == "failed":
        yield "its client left"
    if one.end == "left" and posting.completion_tokens < one.chunks:
        yield "less than it got"
