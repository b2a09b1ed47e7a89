"""Stage 3's arithmetic: requests and tokens in a sliding minute, and requests at one time.

Pure: callers pass `now_s` (any clock that never runs backwards) and get decisions. `store/` holds
the state and acts; `store/redis` will run the same arithmetic and be tested against this file.

What a key was granted is kept by half-second slots of the last minute, so a settlement corrects
the very slot in which the reservation was made, and nothing where that slot has left the window. A
token bucket cannot do that: a refund after the bucket has refilled is capacity that was never lost,
and reserving and refunding in turns multiplies the burst. A slot counts until a full minute after
its end, so no interval of 60 s ever holds more than the limit.

    reserve   one request, the tokens it may use at most, one of the places at a time: all or none
    settle    give back the tokens that were not used (more may have been: debt), and the place
    release   give back everything, as if the request had never come
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.types import Limits

Dimension: TypeAlias = Literal["requests", "tokens", "concurrency"]

WINDOW_S = 60.0
SLOTS_PER_S = 2
# Nobody can know when a running request ends; a client that asks again after this is polite.
CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was taken for one request, and in which slot. Closed once, by settle or release."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not go now. `wait_s` None: it never may, its cost is over the limit."""

    dimension: Dimension
    limit: int
    used: int
    cost: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One rate for the x-ratelimit headers. `reset_s`: until nothing of it is used."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Window:
    """Amounts of the last minute by slot, oldest first; `total` is their sum."""

    slots: deque[list[int]] = field(default_factory=deque)
    total: int = 0

    def expire(self, now_s: float) -> None:
        """Forget what has left the window. At most 122 slots are ever held."""
        while self.slots and _expires_s(self.slots[0][0]) <= now_s:
            self.total -= self.slots.popleft()[1]

    def add(self, slot: int, amount: int) -> None:
        """Charge the newest slot."""
        if self.slots and self.slots[-1][0] >= slot:
            self.slots[-1][1] += amount
        else:
            self.slots.append([slot, amount])
        self.total += amount

    def correct(self, slot: int, amount: int) -> None:
        """Change what an earlier `add` charged; nothing where its slot has left the window."""
        for entry in reversed(self.slots):
            if entry[0] == slot:
                entry[1] += amount
                self.total += amount
                return

    def wait_s(self, limit: int, cost: int, now_s: float) -> float | None:
        """How long until `cost` fits: 0 now, None never."""
        if cost > limit:
            return None
        excess = self.total + cost - limit
        if excess <= 0:
            return 0.0
        slots = iter(self.slots)
        slot = 0
        while excess > 0:  # ends: the slots add up to `total`, and cost <= limit
            slot, amount = next(slots)
            excess -= amount
        return _expires_s(slot) - now_s

    def figures(self, limit: int, now_s: float) -> Figures:
        """For the headers."""
        used_up_s = next((_expires_s(s) - now_s for s, amount in reversed(self.slots) if amount), 0)
        return Figures(limit, max(0, limit - self.total), max(0.0, used_up_s))


@dataclass(slots=True)
class KeyState:
    """What one key has been granted. All counts are kept even where the limit is 0 (unlimited),
    so that a limit set later finds them right."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    num_open: int = 0

    def is_idle(self, now_s: float) -> bool:
        """Nothing is counted any more: forgetting this state changes no decision."""
        self.requests.expire(now_s)
        self.tokens.expire(now_s)
        return not self.num_open and not self.requests.slots and not self.tokens.slots


def reserve(state: KeyState, limits: Limits, tokens: int, now_s: float) -> Reservation | Refusal:
    """Take one request and `tokens`, or change nothing and say what is in the way longest."""
    state.requests.expire(now_s)
    state.tokens.expire(now_s)
    refusals: list[Refusal] = []
    if limits.max_concurrency and state.num_open >= limits.max_concurrency:
        refusals.append(
            Refusal("concurrency", limits.max_concurrency, state.num_open, 1, CONCURRENCY_RETRY_S)
        )
    rates: tuple[tuple[Dimension, Window, int, int], ...] = (
        ("requests", state.requests, limits.requests_per_minute, 1),
        ("tokens", state.tokens, limits.tokens_per_minute, tokens),
    )
    for dimension, window, limit, cost in rates:
        wait_s = window.wait_s(limit, cost, now_s) if limit else 0.0
        if wait_s is None or wait_s > 0:
            refusals.append(Refusal(dimension, limit, window.total, cost, wait_s))
    if refusals:
        return max(refusals, key=lambda r: float("inf") if r.wait_s is None else r.wait_s)
    slot = int(now_s * SLOTS_PER_S)
    state.requests.add(slot, 1)
    state.tokens.add(slot, tokens)
    state.num_open += 1
    # `add` charges the newest slot, which is a later one where the clock's last tick was rounded.
    return Reservation(state.requests.slots[-1][0], tokens)


def settle(state: KeyState, reservation: Reservation, tokens: int) -> None:
    """Close a reservation with what was really used."""
    state.tokens.correct(reservation.slot, tokens - reservation.tokens)
    state.num_open -= 1


def release(state: KeyState, reservation: Reservation) -> None:
    """Close a reservation as if it had never been."""
    state.requests.correct(reservation.slot, -1)
    settle(state, reservation, 0)


def _expires_s(slot: int) -> float:
    return (slot + 1) / SLOTS_PER_S + WINDOW_S
