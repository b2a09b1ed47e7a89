"""Requests of a provider's real clients, from ServeGen's rates and lengths by client and time.

Lives here: reading `servegen_rates` and `servegen_lengths`, and drawing arrivals from them: each
client is a renewal process with the gaps' shape of its current ten minutes, its rate that of the
data times one factor for all (the data have up to thousands of requests a second). Does not: files'
licences (the data folder's README). A client is a tenant; models are drawn by its habits.

After "ServeGen: Workload Characterization and Generation of LLM Serving in Production" (2025).
Not kept: the dependence of answers on prompts (the data have none), what lies above p99.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.sim.batches import Batch, Floats, Ints, fresh, join, mixed, rng, uniform
from bench.sim.casting import Cast
from bench.sim.sources import UnitGaps
from bench.sim.traces import read_rows

SERVICES = ("m-large", "m-mid", "m-small", "deepseek-r1", "mm-image")
WINDOW_S = 600.0
LENGTHS_WINDOW_S = 21600.0
QUANTILES = np.array([0.0, 0.01, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 1.0])
_COLUMNS = ("p1", "p1", "p10", "p25", "p50", "p75", "p90", "p99", "p99")
_PROMPT_FIELDS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")


@dataclass(slots=True)
class Client:
    """One client: rate and gap shape by window, quantiles of lengths by field and window."""

    service: str
    rates: dict[int, tuple[float, bool, float]] = field(default_factory=dict)
    """Window: requests a second, whether gaps are Weibull's (else Gamma's), their shape."""
    lengths: dict[str, dict[int, Floats]] = field(default_factory=dict)
    """Field, window: logarithms (of 1 more) of the quantiles."""


def read_clients(data: Path, service: str | None) -> list[Client]:
    """Clients of one service, or of all, in the order of the file."""
    clients: dict[tuple[str, str], Client] = {}
    for row in read_rows(data / "traces" / "servegen_rates.csv.gz"):
        if service is not None and row["model"] != service:
            continue
        client = clients.setdefault((row["model"], row["client"]), Client(row["model"]))
        window = int(float(row["t_s"]) // WINDOW_S)
        client.rates[window] = (
            float(row["rate_rps"]),
            row["dist"] == "Weibull",
            float(row["p1"] or 1),
        )
    for row in read_rows(data / "traces" / "servegen_lengths.csv.gz"):
        known = clients.get((row["model"], row["client"]))
        if known is not None and row["field"] in (*_PROMPT_FIELDS, "output_tokens"):
            window = int(float(row["t_s"]) // LENGTHS_WINDOW_S)
            values = np.array([float(row[column]) for column in _COLUMNS])
            known.lengths.setdefault(row["field"], {})[window] = np.log1p(values)
    return list(clients.values())


class ClientTraffic:
    """All clients together at a mean of `rate` over the `span_s` of the run; the data repeat.

    Without a span it is their mean over all days: a short run at night then sees less.
    """

    def __init__(
        self,
        clients: list[Client],
        cast: Cast,
        seed: int,
        *,
        rate: float | None = None,
        speed: float = 1.0,
        start_s: float = 0.0,
        span_s: float | None = None,
    ) -> None:
        self._clients = clients
        self._seed = seed
        self._speed = speed
        self._start_s = start_s
        self._num_windows = 1 + max(max(client.rates) for client in clients)
        sums = [sum(value[0] for value in client.rates.values()) for client in clients]
        natural = self._mean_rate(self.lap_s if span_s is None else span_s)
        self._rate = natural if rate is None else rate
        self._factor = self._rate / natural
        self._gaps = [UnitGaps(seed, "client", number) for number in range(len(clients))]
        self._counts = [0] * len(clients)
        ranks = np.argsort(np.argsort(-np.array(sums), kind="stable"), kind="stable")
        self._tenants = cast.cast_labels(len(clients), "tenant", 0)[ranks]
        self._lengths = _lenders(clients, seed)

    @property
    def rate(self) -> float:
        """Mean requests a second."""
        return self._rate

    @property
    def lap_s(self) -> float:
        """Simulated seconds that the data's span takes."""
        return self._num_windows * WINDOW_S / self._speed

    def _mean_rate(self, span_s: float) -> float:
        """Of the data, over that much simulated time from the start."""
        total = np.zeros(self._num_windows)
        for client in self._clients:
            for window, (rate, _, _) in client.rates.items():
                total[window] += rate
        laps, rest_s = divmod(span_s * self._speed, self._num_windows * WINDOW_S)
        first = self._start_s / WINDOW_S
        # Windows met by the rest, each by how much of it is met.
        edges = np.arange(np.floor(first), np.ceil(first + rest_s / WINDOW_S) + 1.0)
        met = np.diff(np.clip(edges, first, first + rest_s / WINDOW_S))
        part = float((total[edges[:-1].astype(np.int64) % self._num_windows] * met).sum())
        mean = (laps * float(total.sum()) + part) / (span_s * self._speed / WINDOW_S)
        if mean <= 0:
            raise ValueError(
                "the data have no requests in that span; begin elsewhere (start=SECONDS)"
            )
        return mean

    def between(self, start_s: float, end_s: float) -> Batch:
        """The window's requests, of all clients; rates change where the data's windows do."""
        batches: list[Batch] = []
        now_s = start_s
        while now_s < end_s:
            at = int((self._start_s + now_s * self._speed) // WINDOW_S)
            change_s = ((at + 1) * WINDOW_S - self._start_s) / self._speed
            # A change within rounding of now is behind us.
            until_s = end_s if change_s <= now_s else min(end_s, change_s)
            batches += self._within(at % self._num_windows, now_s, until_s)
            now_s = until_s
        return join(batches)

    def _within(self, window: int, start_s: float, end_s: float) -> Iterable[Batch]:
        for number, client in enumerate(self._clients):
            value = client.rates.get(window)
            if value is None:
                continue
            rate, weibull, shape = value
            rate *= self._factor
            kind = {"weibull" if weibull else "gamma": shape}
            at = self._gaps[number].pass_by((end_s - start_s) * rate, **kind)
            if len(at):
                yield self._batch(number, window, start_s + at / rate)

    def _batch(self, number: int, window: int, at_s: Floats) -> Batch:
        first = self._counts[number]
        self._counts[number] += len(at_s)
        numbers = np.arange(first, first + len(at_s), dtype=np.uint64)
        key = mixed(numbers, self._seed, "client", number)
        lender = self._lengths[number]
        when = int(window * WINDOW_S // LENGTHS_WINDOW_S)
        prompt = np.zeros(len(at_s), np.int64)
        for name in _PROMPT_FIELDS:
            prompt += _draw(lender, name, when, uniform(key, name))
        output = _draw(lender, "output_tokens", when, uniform(key, "output"))
        batch = fresh(at_s, np.maximum(1, prompt), np.maximum(1, output), key)
        batch.tenant = np.full(len(at_s), self._tenants[number], np.int64)
        return batch


def _lenders(clients: list[Client], seed: int) -> list[Client]:
    """Whose lengths each client has: its own, or where the data lack them another's of its service.

    Drawn with equal chances: the clients without are among the busiest, and to take the busiest
    other one's would make a service of one client's lengths.
    """
    lenders = []
    for number, client in enumerate(clients):
        able = [other for other in clients if other.lengths and other.service == client.service]
        able = able or [other for other in clients if other.lengths]
        if not able:
            raise ValueError("no client has lengths")
        choice = int(rng(seed, "lender", number).integers(len(able)))
        lenders.append(client if client.lengths else able[choice])
    return lenders


def _draw(client: Client, name: str, window: int, u: Floats) -> Ints:
    """Lengths by the inverse of the distribution, straight between quantiles of the logarithm."""
    by_window = client.lengths.get(name)
    if by_window is None:
        return np.zeros(len(u), np.int64)
    nearest = min(by_window, key=lambda other: (abs(other - window), other))
    values = by_window[nearest]
    return np.rint(np.expm1(np.interp(u, QUANTILES, values))).astype(np.int64)
