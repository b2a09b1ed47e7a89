"""Stage 4's rule: whether a request may be answered from, and kept in, the cache. Pure.

A request asks by header, a key by its default; the header wins, so that one request can opt out.
Only answers that would come out the same again are eligible: greedy ones, and those whose caller
named a seed; and only plain ones, without log-probabilities and other choices.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.types import CacheMode

CacheDecision: TypeAlias = Literal["off", "bypass", "lookup"]


@dataclass(frozen=True, slots=True)
class CacheAsk:
    """What decides. `requested` is the header's mode, None where it was not sent. `is_plain`: one
    choice, and of it the text alone; that is what an entry holds."""

    key_mode: CacheMode
    requested: CacheMode | None
    temperature: float
    has_seed: bool
    is_plain: bool = True


def mode_of(ask: CacheAsk) -> CacheMode:
    """The mode in force for a request."""
    return ask.key_mode if ask.requested is None else ask.requested


def decide(ask: CacheAsk) -> CacheDecision:
    """`off`: nobody asked. `bypass`: asked for, but the answer is not one that can be kept."""
    if mode_of(ask) == "off":
        return "off"
    return "lookup" if ask.is_plain and (ask.temperature == 0 or ask.has_seed) else "bypass"
