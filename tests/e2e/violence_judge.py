"""What a violent run must have come to: each client's sight against the ledger (pure).

Lives here: the table of outcomes as a client can see it. Does not: servers, kills, the database.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client import Answer
from registry.money.ledger import Posting

PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS = 1_000, 100, 3_000
ON_THE_WAY_TOKENS = 4
"""Sent to a client and not read as a checkpoint yet: what one step and one write may hold."""


@dataclass(slots=True)
class Seen(Answer):
    """What one client saw of the only request of its key."""

    key_id: str
    secret: str
    leaves_after: int
    whole: bool


def judge(seen: Sequence[Seen], postings: Sequence[Posting], checkpoint_tokens: int) -> list[str]:
    """What is wrong, in words; pure."""
    wrong: list[str] = []
    by_key: dict[str, list[Posting]] = {}
    for posting in postings:
        by_key.setdefault(posting.key_id, []).append(posting)
    known = {one.key_id for one in seen}
    wrong += [f"nobody asked for {p.request_id}" for p in postings if p.key_id not in known]
    for one in seen:
        mine = by_key.get(one.key_id, [])
        if len(mine) > 1:
            wrong.append(f"{one.key_id}: {len(mine)} postings")
        elif mine:
            problems = (*_problems(one, mine[0]), *_lag(one, mine[0], checkpoint_tokens))
            wrong += [f"{problem}: {one}: {mine[0]}" for problem in problems]
        elif one.tokens:
            wrong.append(f"{one}: tokens and no posting")
    return wrong


def cost_of(posting: Posting) -> int:
    """At these prices, of one that is billed."""
    fresh = posting.prompt_tokens - posting.cached_tokens
    cost = fresh * PROMPT_NANOS + posting.cached_tokens * CACHED_NANOS
    return cost + posting.completion_tokens * COMPLETION_NANOS


def _problems(one: Seen, posting: Posting) -> Iterator[str]:
    cost = cost_of(posting)
    if posting.outcome not in ("finished", "disconnected", "failed"):
        yield "an outcome that cannot be"
    if posting.cost_nanos != (0 if posting.outcome == "failed" else cost):
        yield f"should cost {cost}"
    if one.request_id and one.request_id != posting.request_id:
        yield "another request's posting"
    told = (posting.prompt_tokens, posting.completion_tokens)
    if one.end == "done" and (posting.outcome != "finished" or one.told not in (None, told)):
        yield "it was told otherwise"
    if one.end == "error" and posting.outcome != "failed":
        yield "our failure"
    if one.end == "refused" and posting.outcome != "failed":
        yield "it was refused"


def _lag(one: Seen, posting: Posting, checkpoint_tokens: int) -> Iterator[str]:
    """A stream that broke off is billed for what its client got; where nobody was left who could
    tell, for at most `checkpoint_tokens` less, and never for more."""
    if one.end not in ("broken", "left") or one.whole or posting.outcome == "finished":
        return
    short = one.tokens - posting.completion_tokens
    if posting.kind != "recovered":
        if posting.outcome == "disconnected" and short > 0:
            yield "less than it got"
    elif is_checkpoint(posting):
        if short > checkpoint_tokens + ON_THE_WAY_TOKENS:
            yield "too far behind"
        if one.end == "broken" and short < -ON_THE_WAY_TOKENS:
            yield "more than it got"


def is_checkpoint(posting: Posting) -> bool:
    """Neither the gateway nor the worker that served it was left: no usage was told."""
    return posting.kind == "recovered" and not posting.service_s
