"""What a run of `bench.reconcile` must have come to: clients, limits and ledger agree (pure).

Lives here: what each client saw against the postings, sums against budgets, and what is left of a
budget in tokens. Does not: servers, requests, the database.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from registry.ledger import Posting

PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS = 1_000, 100, 3_000
BILLED = ("finished", "disconnected")


@dataclass(slots=True)
class Seen:
    """What one client saw of one request. `end`: done, error, refused, left, or broken. `chunks`:
    events with text. Who gave up before the answer came knows no `request_id`."""

    tenant_id: str
    end: str = ""
    status: int = 0
    code: str = ""
    request_id: str = ""
    chunks: int = 0
    told: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """A tenant's limits; 0: none. `budget_nanos` of the month, `day_tokens` of any 24 hours."""

    budget_nanos: int = 0
    day_tokens: int = 0


def judge(
    seen: Sequence[Seen], postings: Sequence[Posting], promises: Mapping[str, Promise]
) -> list[str]:
    """What is wrong, in words."""
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
        if promise.day_tokens and used > promise.day_tokens:
            wrong.append(f"{tenant_id}: used {used} of {promise.day_tokens} tokens")
    return wrong


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
    fresh = posting.prompt_tokens - posting.cached_tokens
    cost = fresh * PROMPT_NANOS + posting.cached_tokens * CACHED_NANOS
    cost += posting.completion_tokens * COMPLETION_NANOS
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
