"""Policies by name: what `World.policies` means.

    evict      ours, lru, lfu, size, idle or idle:SECONDS, belady, never
    share      ours, fcfs, vtc_tokens, round_robin, quota or quota:SECONDS
    place      ours, static, eager
    affinity   ours, none: whether a prompt goes where its beginning is

`ours` (or no entry) is the product's own, made by the product itself: `None` here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.sim.baselines.eviction import (
    Future,
    Never,
    Ranked,
    furthest,
    largest,
    last_used,
    least_demanded,
)
from bench.sim.baselines.placing import NO_BOUND, StaticSplit
from bench.sim.baselines.sharing import Fcfs, Quota, RoundRobin, TokenCounter
from engine.residency.policy.eviction import EvictionPolicy
from engine.residency.policy.eviction_rules import EvictionParams
from gateway.dispatch.policy.fair_share import TenantOrder
from gateway.dispatch.policy.fleet_sight import Placer
from gateway.dispatch.policy.placement import Placement

OURS = "ours"
NAMES: dict[str, tuple[str, ...]] = {
    "evict": (OURS, "lru", "lfu", "size", "idle", "belady", "never"),
    "share": (OURS, "fcfs", "vtc_tokens", "round_robin", "quota"),
    "place": (OURS, "static", "eager"),
    "affinity": (OURS, "none"),
}
IDLE_TIMEOUT_S = 30.0
QUOTA_S = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A name, and the seconds after its colon."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy in words: names by kind, and settings that differ."""

    text: str
    names: Mapping[str, str]
    settings: Mapping[str, object]


def parse_policy(text: str) -> Policy:
    """From `ours`, `evict=lru+place=eager`, or either with `/NAME=VALUE,...` behind it.

    Raises ValueError that says what there is.
    """
    named, _, more = text.partition("/")
    names: dict[str, str] = {}
    for part in named.split("+"):
        kind, equals, chosen = part.partition("=")
        if part != OURS:
            if not equals:
                raise ValueError(f"{text!r}: write {OURS} or KIND=NAME, such as evict=lru")
            names[kind] = chosen
    parse_policies(names)
    settings = dict(parse_setting(item) for item in more.split(",") if item)
    return Policy(text, names, settings)


def parse_setting(text: str) -> tuple[str, object]:
    """From `NAME=VALUE`: a number (`inf` too) or a truth where it reads as one. Raises ValueError
    that says what to write."""
    name, value = parse_pair(text)
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def parse_pair(text: str) -> tuple[str, str]:
    """From `NAME=VALUE`. Raises ValueError that says what to write."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r}: write NAME=VALUE")
    return name, value


def parse_policies(policies: Mapping[str, str]) -> dict[str, Choice]:
    """By kind. Raises ValueError that says what there is."""
    found = {}
    for kind, text in policies.items():
        name, colon, seconds = text.partition(":")
        if kind not in NAMES:
            raise ValueError(f"there is no kind of policy {kind!r}: one of {', '.join(NAMES)}")
        if name not in NAMES[kind]:
            raise ValueError(f"no {kind} policy {name!r}: one of {', '.join(NAMES[kind])}")
        try:
            found[kind] = Choice(name, float(seconds) if colon else None)
        except ValueError as error:
            raise ValueError(f"{kind}={text}: write seconds, such as {name}:30") from error
        if colon and name not in ("idle", "quota"):
            raise ValueError(f"{kind}={text}: {name} has no seconds")
    return found


def make_eviction(
    policies: Mapping[str, str],
    params: EvictionParams,
    future: Future | None,
    number_of: Mapping[str, int],
) -> EvictionPolicy | None:
    """One for all workers: none of them keeps anything. `number_of`: models by instance id."""
    choice = parse_policies(policies).get("evict", Choice(OURS))
    if choice.name == "lru":
        return Ranked(last_used, params)
    if choice.name == "lfu":
        return Ranked(least_demanded(params.half_lives), params)
    if choice.name == "size":
        return Ranked(largest, params)
    if choice.name == "idle":
        seconds = IDLE_TIMEOUT_S if choice.seconds is None else choice.seconds
        return Ranked(last_used, params, seconds)
    if choice.name == "belady":
        if future is None:
            raise ValueError("belady has to be told the future: give the workload twice")
        return Ranked(furthest(future, number_of), params)
    return Never(params) if choice.name == "never" else None


@dataclass(frozen=True, slots=True)
class DispatchPolicies:
    """What a dispatcher is made with: policies that keep books, so new ones for each."""

    policies: Mapping[str, str]
    homes: Mapping[str, str]

    def share(self) -> TenantOrder | None:
        """Whose turn it is."""
        choice = parse_policies(self.policies).get("share", Choice(OURS))
        if choice.name == "fcfs":
            return Fcfs()
        if choice.name == "vtc_tokens":
            return TokenCounter()
        if choice.name == "round_robin":
            return RoundRobin()
        if choice.name == "quota":
            return Quota(QUOTA_S if choice.seconds is None else choice.seconds)
        return None

    @property
    def marks_prompts(self) -> bool:
        """Whether tickets say how their prompts begin."""
        return parse_policies(self.policies).get("affinity", Choice(OURS)).name == OURS

    def placement(self) -> Placer | None:
        """Who loads what."""
        choice = parse_policies(self.policies).get("place", Choice(OURS))
        if choice.name == "eager":
            return Placement(NO_BOUND)
        return StaticSplit(self.homes) if choice.name == "static" else None
