"""How fast counts rise, as far as somebody looks: samples of the last while, and what came since.

Counters know their sums only. Nothing is sampled while nobody looks, so that the first look has no
rate yet.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.errors import DEADLINE_EXCEEDED, MODEL_FAILED, SERVER_ERROR, UNAVAILABLE
from gateway.pipeline.edge import Edge

ENDED: Final = "polyhost_requests_ended_total"
ERRORS: Final = "polyhost_request_errors_total"
_OWN_FAULT: Final = tuple(
    kind.code for kind in (SERVER_ERROR, UNAVAILABLE, MODEL_FAILED, DEADLINE_EXCEEDED)
)
_VOID: Final = "void"
"""Of requests that ended without a token: counted as the error that was answered."""
_LINE: Final = re.compile(
    rb'^(polyhost_requests_ended_total|polyhost_request_errors_total)\{.*?(?:outcome|code)="(\w+)"\}'
    rb" (\S+)$",
    re.MULTILINE,
)


def counts(edge: Edge, wanted: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Metric -> value of its label -> how many, over its other labels. `wanted`: metric -> label,
    "" where it has none.

    Only the collectors of these are asked, so that it costs no scrape.
    """
    found: dict[str, dict[str, int]] = {name: {} for name in wanted}
    for metric in edge.services.metrics_registry.restricted_registry(list(wanted)).collect():
        for sample in metric.samples:
            if sample.name in wanted:
                counted, label = found[sample.name], sample.labels.get(wanted[sample.name], "")
                counted[label] = counted.get(label, 0) + int(sample.value)
    return found


class Rising:
    """Counts by name, sampled now and then, over the last `span_s`.

    `from_zero`: a count that was not there began with 0. Otherwise it was not seen: whoever counts
    (a worker) may have done so for hours before it was heard of, or heard of again.
    """

    def __init__(self, span_s: float, from_zero: bool = True) -> None:
        self._span_s = span_s
        self._from_zero = from_zero
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque()

    def since(self, now_s: float, counts: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Seconds that are looked back on, and what was added in them; 0 and nothing at the first
        look. A count that fell began anew."""
        if self._samples and now_s < self._samples[-1][0]:
            self._samples.clear()  # the clock was set back
        self._samples.append((now_s, counts))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._span_s:
            self._samples.popleft()
        if len(self._samples) > 1 and self._samples[0][0] < now_s - 3 * self._span_s:
            self._samples.popleft()  # nobody looked for long: that is no rate of now
        began_s = self._samples[0][0]
        added: dict[str, float] = {}
        before = dict(self._samples[0][1])
        for _, after in list(self._samples)[1:]:
            for name, count in after.items():
                more = count - before.get(name, 0.0 if self._from_zero else count)
                added[name] = added.get(name, 0.0) + (more if more >= 0 else count)
            before |= after
        return now_s - began_s, added


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers of some time. `num_failed`: by our fault, before or after tokens; `num_refused`: by
    the caller's, or by a limit."""

    num_all: int
    num_failed: int
    num_refused: int
    span_s: float | None
    """None: since the server's processes began."""

    @property
    def failed_share(self) -> float:
        """Of all answers."""
        return self.num_failed / self.num_all if self.num_all else 0.0


async def answer_counts(edge: Edge) -> dict[str, float]:
    """Sums of all processes, since they began: outcomes, and codes of errors. On the event loop."""
    sums: dict[str, float] = {}
    if edge.services.scrape is not None:
        for metric, label, value in _LINE.findall(await edge.services.scrape()):
            name = f"{'ended' if metric.decode() == ENDED else 'error'}/{label.decode()}"
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums
    counted = counts(edge, {ENDED: "outcome", ERRORS: "code"})
    for kind, metric_name in (("ended", ENDED), ("error", ERRORS)):
        sums.update({f"{kind}/{label}": float(n) for label, n in counted[metric_name].items()})
    return sums


def answered(sums: Mapping[str, float], span_s: float | None) -> Answered:
    """What these counts come to."""
    ended = {name: int(n) for name, n in sums.items() if name.startswith("ended/")}
    coded = {
        name.partition("/")[2]: int(n) for name, n in sums.items() if name.startswith("error/")
    }
    broken = ended.get("ended/failed", 0)
    failed = sum(n for code, n in coded.items() if code in _OWN_FAULT)
    with_tokens = sum(n for name, n in ended.items() if name != f"ended/{_VOID}")
    refused = sum(coded.values()) - failed
    return Answered(with_tokens + sum(coded.values()), failed + broken, refused, span_s)
