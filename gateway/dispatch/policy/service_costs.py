"""What requests will cost, and who pays for loads (pure).

`ServiceEstimator` predicts a request's output and device seconds before it runs; `LoadCosts`
splits the seconds of a load among the tenants that caused it and those that use what it brought.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

OUTPUT_UNITS = 2.0
"""An output token costs about this many prompt tokens (the VTC paper's price ratio)."""
DEFAULT_UNIT_S = 1e-3
NEWEST_SHARE = 0.2
MAX_OUTPUTS = 10_000
"""(tenant, model) pairs remembered; the oldest is forgotten beyond it."""


class Prediction(NamedTuple):
    """Expected output tokens, device seconds and units of work of one request."""

    output_tokens: int
    service_s: float
    units: float = 0.0


class ServiceEstimator:
    """Learns from finished requests.

    Averages, all exponential over finished requests: output tokens per (tenant, model), per model
    for tenants of which none has finished there, and seconds per unit of work per model, where a
    unit is one uncached prompt token or 1/OUTPUT_UNITS of an output token. Before anything has
    finished, the output is taken as `max_tokens` and the rate as DEFAULT_UNIT_S; the same guess for
    everyone is fair, and each end trues it up.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, str], float] = {}
        self._model_outputs: dict[str, float] = {}
        self._unit_s: dict[str, float] = {}

    def predict(
        self, tenant_id: str, model_id: str, prompt_tokens: int, max_tokens: int, made: int = 0
    ) -> Prediction:
        """Before a grant. The output is between 1 and `max_tokens`; none for an encoder (0). Of a
        request that goes on behind `made` tokens: what is left; what is there is read again."""
        usual = self._outputs.get((tenant_id, model_id))
        if usual is None:
            usual = self._model_outputs.get(model_id, float(max_tokens))
        output = min(max_tokens - made, max(1, round(usual) - made))
        unit_s = self.unit_s(model_id)
        units = units_of(prompt_tokens + made, output)
        return Prediction(output, unit_s * units, units)

    def unit_s(self, model_id: str) -> float:
        """Device seconds of one prompt token."""
        return self._unit_s.get(model_id, DEFAULT_UNIT_S)

    def observe(
        self,
        tenant_id: str,
        model_id: str,
        uncached_tokens: int,
        output_tokens: int,
        service_s: float,
    ) -> None:
        """After a request ended by itself (aborted ones say nothing about length)."""
        key = (tenant_id, model_id)
        before = self._outputs.pop(key, float(output_tokens))
        if len(self._outputs) >= MAX_OUTPUTS:
            del self._outputs[next(iter(self._outputs))]
        self._outputs[key] = before + NEWEST_SHARE * (output_tokens - before)
        of_all = self._model_outputs.get(model_id, float(output_tokens))
        self._model_outputs[model_id] = of_all + NEWEST_SHARE * (output_tokens - of_all)
        units = units_of(uncached_tokens, output_tokens)
        if units > 0 and 0 < service_s < math.inf:
            rate = service_s / units
            before_s = self._unit_s.get(model_id, rate)
            self._unit_s[model_id] = before_s + NEWEST_SHARE * (rate - before_s)

    def keep_models(self, model_ids: frozenset[str]) -> None:
        """Forget models that are not hosted any more."""
        self._unit_s = {m: rate for m, rate in self._unit_s.items() if m in model_ids}
        self._outputs = {key: n for key, n in self._outputs.items() if key[1] in model_ids}
        self._model_outputs = {m: n for m, n in self._model_outputs.items() if m in model_ids}


def units_of(prompt_tokens: int, output_tokens: int) -> float:
    """Tokens, an output token for as many as it costs."""
    return prompt_tokens + OUTPUT_UNITS * output_tokens


def estimate_wait_s(backlog_s: float, num_workers: int, longest_s: float) -> float:
    """Seconds until a queue of that much predicted service is worked off; 1 at least."""
    return min(max(1.0, backlog_s / max(1, num_workers)), longest_s)


Residency: TypeAlias = tuple[str, str]
"""(worker, model)."""

NO_CAUSES: Mapping[str, float] = {}


class Transfer(NamedTuple):
    """Service that a tenant is charged; below 0: that it gets back."""

    tenant_id: str
    service_s: float


@dataclass(slots=True)
class _Debt:
    """`shares` add up to 1; `left_s` is not yet paid back."""

    shares: dict[str, float]
    left_s: float


class LoadCosts:
    """Loads under way and loads not yet paid back: as many as models are on devices.

        begin     a load begins: the backlogs of tenants whose work waits for it are its causes
        finish    it took so long: each cause is charged in proportion to its backlog
        use       a tenant uses the model: it pays as much again as its service, until the load is
                  paid, to those who were charged for it, in proportion to what they were charged
        end       the model left: what is not paid back stays with those who caused the load

    So the load of a model that many use costs each of them in proportion to its use, as far as a
    load's time of use goes; a tenant that has models loaded that nobody else wants pays for them
    alone. A load that nobody waited for (prefetched, pinned, an operator's) is the system's, and
    nobody pays it back. Loads run beside steps on a device that computes, so their time is no part
    of any step's.
    """

    def __init__(self) -> None:
        self._causes: dict[Residency, dict[str, float]] = {}
        self._debts: dict[Residency, _Debt] = {}
        self.charged_s: dict[str, float] = {}
        """By tenant: what loads have cost it so far, less what it was paid back."""
        self.system_s = 0.0

    def is_known(self, residency: Residency) -> bool:
        """Whether its load has begun."""
        return residency in self._causes

    def begin(self, residency: Residency, backlog_s: Mapping[str, float]) -> None:
        """`backlog_s`: predicted service that waits for the model, by tenant; empty: nobody's."""
        self._causes[residency] = {name: s for name, s in backlog_s.items() if s > 0}

    def finish(
        self, residency: Residency, took_s: float, backlog_s: Mapping[str, float] = NO_CAUSES
    ) -> list[Transfer]:
        """`backlog_s` counts where nobody saw the load begin."""
        causes = self._causes.pop(residency, None)
        if causes is None:
            causes = {name: s for name, s in backlog_s.items() if s > 0}
        self._debts.pop(residency, None)
        total_s = sum(causes.values())
        if not causes or total_s <= 0 or took_s <= 0:
            self.system_s += max(0.0, took_s)
            return []
        shares = {name: s / total_s for name, s in causes.items()}
        self._debts[residency] = _Debt(shares, took_s)
        return self._noted([Transfer(name, share * took_s) for name, share in shares.items()])

    def use(self, residency: Residency, tenant_id: str, service_s: float) -> list[Transfer]:
        """The transfers add up to 0."""
        debt = self._debts.get(residency)
        if debt is None or service_s <= 0:
            return []
        paid_s = min(debt.left_s, service_s)
        debt.left_s -= paid_s
        if debt.left_s <= 0:
            del self._debts[residency]
        if debt.shares.get(tenant_id) == 1.0:
            return []  # to itself
        back = [Transfer(name, -share * paid_s) for name, share in debt.shares.items()]
        return self._noted([Transfer(tenant_id, paid_s), *back])

    def owed_s(self, residency: Residency) -> float:
        """Of its load, what is not paid back yet."""
        debt = self._debts.get(residency)
        return 0.0 if debt is None else debt.left_s

    def end(self, residency: Residency) -> None:
        """The model has left the worker, or its load came to nothing."""
        self._causes.pop(residency, None)
        self._debts.pop(residency, None)

    def keep_under_way(self, worker_id: str, loading: Collection[Residency]) -> None:
        """Loads of that worker that are not among these have come to nothing."""
        for residency in [key for key in self._causes if key[0] == worker_id]:
            if residency not in loading:
                del self._causes[residency]

    def lose_worker(self, worker_id: str) -> None:
        """Nothing is there any more."""
        for books in (self._causes, self._debts):
            for residency in [key for key in books if key[0] == worker_id]:
                del books[residency]

    def _noted(self, transfers: list[Transfer]) -> list[Transfer]:
        for tenant_id, service_s in transfers:
            self.charged_s[tenant_id] = self.charged_s.get(tenant_id, 0.0) + service_s
        return transfers
