"""Worlds in which tenants are unkind to one another, for the fairness table.

    overload      two tenants ask for more than there is, one twice as often (VTC paper, figure 3)
    lengths       two tenants that both ask too much: short answers against long (its figure 6)
    weights       three tenants of weights 1, 2 and 4 that all ask too much
    quiet         a tenant of few requests beside a flood on the same model; alone: without it
    other_model   the same, on two models that are both there
    cold          the quiet tenant wants one cold model after another, the flood stays on its own
    spray         the flood wants one cold model after another, the quiet tenant stays on its own
    re_entry      two tenants; one is away for half of each minute

Lives here: who asks when for what. Does not: policies, figures (bench/sim_fairness.py).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from bench.sim.devices import DEVICES
from bench.sim.types import Arrival, SimModel, SimTenant, World

LLAMA, SMALL = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"
PATIENT: dict[str, object] = {
    "max_queue_per_tenant": 20_000,
    "max_queue_total": 40_000,
    "queue_timeout_s": 3_600.0,
    "request_timeout_s": 7_200.0,
}
"""Nobody is refused: what is measured is the order."""
QUIET, FLOOD = 0, 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """`tenants` are those that are compared; `alone`: their requests without the others'.

    until_s   what is counted ends here: all who ask too much still do
    """

    world: World
    arrivals: Callable[[bool], Iterator[Arrival]]
    until_s: float
    tenants: tuple[int, ...]


Draw = Callable[[random.Random], tuple[int, int]]


def fixed(prompt: int, output: int) -> Draw:
    """Always these lengths."""
    return lambda rng: (prompt, output)


def chat(rng: random.Random) -> tuple[int, int]:
    """Log-normal, means of about 350 and 130 tokens."""
    return 1 + int(min(4000, rng.lognormvariate(5.4, 0.9))), 1 + int(
        min(800, rng.lognormvariate(4.5, 0.8))
    )


def stream(
    tenant: int,
    models: Sequence[int],
    rate: float,
    seconds: float,
    lengths: Draw,
    seed: int,
    on: Callable[[float], bool] = lambda now_s: True,
) -> Iterator[Arrival]:
    """Poisson arrivals of one tenant, over its models in turns, while it is `on`."""
    rng = random.Random(f"{seed} {tenant}")
    now_s, number = 0.0, 0
    while (now_s := now_s + rng.expovariate(rate)) < seconds:
        if not on(now_s):
            continue
        prompt, output = lengths(rng)
        content = 1 + tenant * 10**7 + number
        model = models[number % len(models)]
        number += 1
        # What the model says before its end; the client allows for as much again.
        yield Arrival(now_s, tenant, model, ((content, prompt),), output, 2 * output + 16)


def _world(
    device: str, models: Sequence[str], weights: Sequence[float], **settings: object
) -> World:
    return World(
        1,
        replace(DEVICES[device]),
        tuple(SimModel(f"m{n}", shape) for n, shape in enumerate(models)),
        tuple(SimTenant(f"t{n}", weight) for n, weight in enumerate(weights)),
        settings={**PATIENT, **settings},
    )


def _of(streams: Callable[[], list[Iterator[Arrival]]]) -> Callable[[bool], Iterator[Arrival]]:
    """Alone, the first stream only."""
    return lambda alone: merge(*streams()[: 1 if alone else None], key=lambda a: a.at_s)


def _overload(seconds: float, seed: int) -> Scenario:
    return Scenario(
        _world("l4", [LLAMA], [1, 1]),
        _of(
            lambda: [
                stream(0, [0], 5.0, seconds, fixed(256, 256), seed),
                stream(1, [0], 10.0, seconds, fixed(256, 256), seed),
            ]
        ),
        seconds,
        (0, 1),
    )


def _lengths(seconds: float, seed: int) -> Scenario:
    return Scenario(
        _world("l4", [LLAMA], [1, 1]),
        _of(
            lambda: [
                stream(0, [0], 12.0, seconds, fixed(64, 64), seed),
                stream(1, [0], 4.0, seconds, fixed(512, 256), seed),
            ]
        ),
        seconds,
        (0, 1),
    )


def _weights(seconds: float, seed: int) -> Scenario:
    """Few rows: what outstanding grants blur is small against what is shared out."""
    return Scenario(
        _world("l4", [LLAMA], [1, 2, 4], max_num_seqs=16),
        _of(lambda: [stream(n, [0], 3.0, seconds, chat, seed) for n in range(3)]),
        seconds,
        (0, 1, 2),
    )


def _beside_a_flood(models: Sequence[str], seconds: float, seed: int) -> Scenario:
    """The quiet tenant is on the last of the models, the flood on the first."""
    return Scenario(
        _world("a100-80g", models, [1, 1]),
        _of(
            lambda: [
                stream(QUIET, [len(models) - 1], 2.0, seconds, chat, seed),
                stream(FLOOD, [0], 25.0, seconds, fixed(512, 256), seed),
            ]
        ),
        seconds,
        (QUIET, FLOOD),
    )


def _cold_models(
    quiet: tuple[float, bool], flood: tuple[float, bool], seconds: float, seed: int
) -> Scenario:
    """(rate, on cold models or on the small one): two of the eight fit beside the small one."""
    cold = list(range(1, 9))

    def ask(tenant: int, rate: float, is_cold: bool) -> Iterator[Arrival]:
        return stream(tenant, cold if is_cold else [0], rate, seconds, chat, seed)

    return Scenario(
        _world("a100-80g", [SMALL, *[LLAMA] * 8], [1, 1], arena_bytes=44 << 30),
        _of(lambda: [ask(QUIET, *quiet), ask(FLOOD, *flood)]),
        seconds,
        (QUIET, FLOOD),
    )


def _re_entry(seconds: float, seed: int) -> Scenario:
    return Scenario(
        _world("l4", [LLAMA], [1, 1]),
        _of(
            lambda: [
                stream(0, [0], 6.0, seconds, chat, seed, on=lambda now_s: now_s % 60 < 30),
                stream(1, [0], 6.0, seconds, chat, seed),
            ]
        ),
        seconds,
        (0, 1),
    )


_MAKERS: dict[str, Callable[[float, int], Scenario]] = {
    "overload": _overload,
    "lengths": _lengths,
    "weights": _weights,
    "quiet": lambda seconds, seed: _beside_a_flood([LLAMA], seconds, seed),
    "other_model": lambda seconds, seed: _beside_a_flood([LLAMA, SMALL], seconds, seed),
    "cold": lambda seconds, seed: _cold_models((0.25, True), (60.0, False), seconds, seed),
    "spray": lambda seconds, seed: _cold_models((2.0, False), (10.0, True), seconds, seed),
    "re_entry": _re_entry,
}
NAMES = tuple(_MAKERS)


def make(name: str, seconds: float, seed: int = 0) -> Scenario:
    """Raises KeyError for a name that is not above."""
    return _MAKERS[name](seconds, seed)
