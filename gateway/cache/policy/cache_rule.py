"""Stage 4's first rule: whether a request may be answered from, and kept in, the cache. Pure.

A request asks by header, a key by its policy; the header wins, so that one request can opt out.
Eligible is what would come out the same again: greedy answers, and of those that are drawn the ones
whose caller named a seed. Others only where key or header say so by name (`sampled`). And only
plain ones, without log-probabilities and other choices. Whether an answer to another question will
do is cache_choice.py's.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.types import CacheMode, CachePolicy

CacheDecision: TypeAlias = Literal["off", "bypass", "lookup"]


@dataclass(frozen=True, slots=True)
class CacheHeaders:
    """What a request's headers say. `mode`, `max_age_s`, `sampled` None: nothing.

    `reads`: it may be answered from the cache; `keeps`: its answer may be kept.
    """

    mode: CacheMode | None = None
    max_age_s: float | None = None
    sampled: bool | None = None
    reads: bool = True
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What decides. `is_plain`: one choice, and of it the text alone; that is what an entry holds.
    `has_turn`: its last message is a text of the user's, by which others can be like it.
    `has_embedder`: the server is set up to compare meanings."""

    policy: CachePolicy
    headers: CacheHeaders
    temperature: float
    has_seed: bool
    is_plain: bool = True
    has_turn: bool = True
    has_embedder: bool = True


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What is done for a request. `decision` off: nobody asked; bypass: asked for, but the answer
    is not one that can be kept. The rest counts for `lookup` alone.

    `mode`: `semantic` and `shadow` where its meaning is compared, too. `drawn`: its answer is one
    of many, and any of them will do.
    """

    decision: CacheDecision = "off"
    mode: CacheMode = "off"
    max_age_s: float | None = None
    false_hit_budget: float | None = None
    reads: bool = True
    keeps: bool = True
    drawn: bool = False


OFF = CachePlan()
BYPASS = CachePlan("bypass")


def mode_of(ask: CacheRequest) -> CacheMode:
    """The mode in force for a request."""
    return ask.policy.mode if ask.headers.mode is None else ask.headers.mode


def decide(ask: CacheRequest) -> CachePlan:
    """What is done. Meanings are compared where a temperature of 0 or `sampled` says that any
    caller who asks this gets this; a seed alone says so of the very same request only. In shadow
    mode nothing is served, so where no meanings can be compared there is nothing to do."""
    mode = mode_of(ask)
    if mode == "off":
        return OFF
    sampled = ask.policy.sampled if ask.headers.sampled is None else ask.headers.sampled
    greedy = ask.temperature == 0
    if not ask.is_plain or not (greedy or ask.has_seed or sampled):
        return BYPASS
    means = ask.has_turn and ask.has_embedder and (greedy or sampled)
    if mode == "shadow" and not means:
        return BYPASS
    ages = [s for s in (ask.policy.max_age_s, ask.headers.max_age_s) if s is not None]
    return CachePlan(
        "lookup",
        mode if means else "exact",
        min(ages, default=None),
        ask.policy.false_hit_budget,
        ask.headers.reads,
        ask.headers.keeps,
        drawn=sampled and not greedy and not ask.has_seed,
    )
