"""Decisions about who leaves the device, as they are told (protocol.SwapChoice).

A load that has to wait is decided about anew at every step, mostly with the same outcome: that is
told once, and again only when somebody leaves or the reasons change, RETELL_S apart at the least.
Bounded: what nobody takes falls out, the oldest first.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

from engine.policy.eviction import (
    Candidate,
    EvictionParams,
    Newcomer,
    Victims,
    candidate_score,
)
from engine.protocol import MAX_CANDIDATES, SwapCandidate, SwapChoice
from engine.protocol_status import Outcome

RETELL_S = 1.0
MOST_KEPT = 256

Reason: TypeAlias = Literal["load", "kv", "prefetch", "operator"]


class SwapChoices:
    """What was decided and has not been taken yet."""

    def __init__(self, params: EvictionParams) -> None:
        self._params = params
        self._choices: deque[SwapChoice] = deque(maxlen=MOST_KEPT)
        self._last: object = None
        self._last_s = float("-inf")

    def take(self) -> list[SwapChoice]:
        """Those since the last call."""
        taken = list(self._choices)
        self._choices.clear()
        return taken

    def for_load(
        self,
        newcomer: Newcomer,
        score: float,
        num_pages_short: int,
        candidates: Sequence[Candidate],
        victims: Victims,
        claimed: Collection[str],
        now_s: float,
    ) -> None:
        """Somebody had to go for a load. `claimed`: whose room a waiting request needs."""
        outcomes = {c.model_id: _outcome(c, victims, claimed) for c in candidates}
        leaves = bool(victims.evict or victims.drain)
        told = (newcomer.model_id, tuple(outcomes.values()))
        if not leaves and (told == self._last or now_s - self._last_s < RETELL_S):
            return
        self._last, self._last_s = told, now_s
        rows = [self._row(c, outcomes[c.model_id], victims.scores, now_s) for c in candidates]
        rows.sort(key=lambda row: (row.outcome.startswith("kept"), row.score, row.model_id))
        self._choices.append(
            SwapChoice(
                newcomer=newcomer.model_id,
                reason="prefetch" if newcomer.prefetch else "load",
                num_pages_short=num_pages_short,
                waited_s=max(0.0, now_s - newcomer.queued_at_s),
                score=score,
                candidates=rows[:MAX_CANDIDATES],
            )
        )

    def for_one(
        self,
        newcomer: str,
        reason: Reason,
        candidates: Sequence[Candidate],
        victim: str,
        outcome: Outcome,
        now_s: float,
    ) -> None:
        """One model goes, for the KV of `newcomer` or because an operator asked for it."""
        scores = {c.model_id: candidate_score(c, now_s, self._params) for c in candidates}
        rows = [
            self._row(
                candidate,
                outcome if candidate.model_id == victim else _kept(candidate),
                scores,
                now_s,
            )
            for candidate in candidates
            if candidate.model_id != newcomer
        ]
        rows.sort(key=lambda row: (row.outcome.startswith("kept"), row.score, row.model_id))
        self._choices.append(SwapChoice(newcomer, reason, 0, 0.0, 0.0, rows[:MAX_CANDIDATES]))

    def _row(
        self, candidate: Candidate, outcome: Outcome, scores: dict[str, float], now_s: float
    ) -> SwapCandidate:
        return SwapCandidate(
            model_id=candidate.model_id,
            outcome=outcome,
            score=scores.get(candidate.model_id, 0.0),
            demand=candidate.demand.rate(now_s, self._params.half_lives),
            reload_s=candidate.reload_s,
            weight=candidate.weight,
            size_bytes=candidate.num_bytes,
            num_pages=candidate.num_pages,
        )


def _outcome(candidate: Candidate, victims: Victims, claimed: Collection[str]) -> Outcome:
    model_id = candidate.model_id
    if model_id in victims.evict:
        return "evicted"
    if candidate.draining or model_id in victims.drain:
        return "drains"
    if model_id in claimed:
        return "kept: claimed"
    rule = victims.kept.get(model_id)
    if rule is None:
        return "kept: not needed"
    kept: dict[str, Outcome] = {
        "pinned": "kept: pinned",
        "floor": "kept: floor",
        "first use": "kept: first use",
        "residence": "kept: residence",
        "margin": "kept: margin",
        "busy": "kept: busy",
    }
    return kept[rule]


def _kept(candidate: Candidate) -> Outcome:
    return "kept: pinned" if candidate.pinned else "kept: not needed"
