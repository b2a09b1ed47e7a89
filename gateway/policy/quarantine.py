"""Models whose requests take workers down are not served for a while (pure).

A worker that dies with requests of a model in its hands is a strike against that model; a request
of it that ends by itself clears everything held against it. Two deaths in a row, with nothing
served between, and the model is quarantined: for FIRST_TERM_S, then on trial, where one more death
is enough and the term is twice the last. A worker that is killed from outside may so cost a model a
minute; a model that kills every worker it touches is kept from them ever longer. A new revision, or
an operator who loads it, ends a term at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STRIKES = 2
FIRST_TERM_S = 60.0
LONGEST_TERM_S = 3600.0

Key = tuple[str, str]
"""Model name and revision."""


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    num_terms: int = 0
    until_s: float = 0.0
    reason: str = ""


class Quarantine:
    """What is held against models, by (model, revision)."""

    def __init__(self) -> None:
        self._records: dict[Key, _Record] = {}

    def worker_died(self, models: Iterable[Key], reason: str, now_s: float) -> list[str]:
        """`models` had requests there. Returns the names that are quarantined from now on."""
        newly = []
        for key in sorted(set(models)):
            record = self._records.setdefault(key, _Record())
            record.strikes += 1
            if record.strikes >= STRIKES and now_s >= record.until_s:
                term_s = min(LONGEST_TERM_S, FIRST_TERM_S * 2**record.num_terms)
                record.num_terms += 1
                record.until_s = now_s + term_s
                record.reason = (
                    f"its requests were running when {record.strikes} workers in a row died "
                    f"(last: {reason}); it is tried again {term_s:.0f} s after that"
                )
                newly.append(key[0])
        return newly

    def served(self, model: str, revision: str) -> None:
        """A request of the model ended by itself."""
        self._records.pop((model, revision), None)

    def reason(self, model: str, revision: str, now_s: float) -> str | None:
        """Why the model is not served; None if it is."""
        record = self._records.get((model, revision))
        return record.reason if record is not None and now_s < record.until_s else None

    def reasons(self, now_s: float) -> Mapping[str, str]:
        """Model name -> why."""
        return {
            model: record.reason
            for (model, _), record in self._records.items()
            if now_s < record.until_s
        }

    def clear(self, model: str) -> bool:
        """An operator wants it tried again. True: something was held against it."""
        before = len(self._records)
        self._records = {key: one for key, one in self._records.items() if key[0] != model}
        return len(self._records) < before

    def keep(self, models: Iterable[Key]) -> None:
        """Forget (model, revision) pairs that are not hosted any more."""
        kept = set(models)
        self._records = {key: one for key, one in self._records.items() if key in kept}
