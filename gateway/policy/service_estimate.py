"""What a request will cost, before it runs: predicted output and device seconds (pure).

Averages, all exponential over finished requests: output tokens per (tenant, model), per model for
tenants of which none has finished there, and seconds per unit of work per model, where a unit is
one uncached prompt token or 1/OUTPUT_UNITS of an output token. Before anything has finished, the
output is taken as `max_tokens` and the rate as DEFAULT_UNIT_S; the same guess for everyone is fair,
and each end trues it up.
"""

import math
from dataclasses import dataclass

OUTPUT_UNITS = 2.0
"""An output token costs about this many prompt tokens (the VTC paper's price ratio)."""
DEFAULT_UNIT_S = 1e-3
NEWEST_SHARE = 0.2
MAX_OUTPUTS = 10_000
"""(tenant, model) pairs remembered; the oldest is forgotten beyond it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected output tokens, device seconds and units of work of one request."""

    output_tokens: int
    service_s: float
    units: float = 0.0


class ServiceEstimator:
    """Learns from finished requests."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, str], float] = {}
        self._model_outputs: dict[str, float] = {}
        self._unit_s: dict[str, float] = {}

    def predict(
        self, tenant_id: str, model_id: str, prompt_tokens: int, max_tokens: int
    ) -> Prediction:
        """Before a grant. The output is between 1 and `max_tokens`; none for an encoder (0)."""
        usual = self._outputs.get((tenant_id, model_id))
        if usual is None:
            usual = self._model_outputs.get(model_id, float(max_tokens))
        output = min(max_tokens, max(1, round(usual)))
        unit_s = self._unit_s.get(model_id, DEFAULT_UNIT_S)
        units = units_of(prompt_tokens, output)
        return Prediction(output, unit_s * units, units)

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
