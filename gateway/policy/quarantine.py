"""Models whose requests take workers down are not served (pure).

A worker that dies with requests of a model in its hands is a strike against that model; a request
of it that ends by itself clears the strikes. Two deaths in a row, with nothing served between,
and the model is quarantined, until its revision changes or an operator loads it. So a worker that
is killed twice under load from outside quarantines nothing, because work ended in between; a
model that kills every worker it touches is stopped at the second.
"""

from collections.abc import Iterable, Mapping

STRIKES = 2


class Quarantine:
    """Strikes and verdicts by (model, revision)."""

    def __init__(self) -> None:
        self._strikes: dict[tuple[str, str], int] = {}
        self._reasons: dict[tuple[str, str], str] = {}

    def worker_died(self, models: Iterable[tuple[str, str]], reason: str) -> list[str]:
        """`models` had requests there. Returns the names that are quarantined from now on."""
        newly = []
        for key in sorted(set(models)):
            self._strikes[key] = self._strikes.get(key, 0) + 1
            if self._strikes[key] >= STRIKES and key not in self._reasons:
                self._reasons[key] = (
                    f"its requests were running when {self._strikes[key]} workers in a row died "
                    f"(last: {reason})"
                )
                newly.append(key[0])
        return newly

    def served(self, model: str, revision: str) -> None:
        """A request of the model ended by itself."""
        self._strikes.pop((model, revision), None)

    def reason(self, model: str, revision: str) -> str | None:
        """Why the model is not served; None if it is."""
        return self._reasons.get((model, revision))

    def reasons(self) -> Mapping[str, str]:
        """Model name -> why."""
        return {model: reason for (model, _), reason in self._reasons.items()}

    def clear(self, model: str) -> None:
        """An operator wants it tried again."""
        self._strikes = {key: n for key, n in self._strikes.items() if key[0] != model}
        self._reasons = {key: text for key, text in self._reasons.items() if key[0] != model}

    def keep(self, models: Iterable[tuple[str, str]]) -> None:
        """Forget (model, revision) pairs that are not hosted any more."""
        kept = set(models)
        self._strikes = {key: n for key, n in self._strikes.items() if key in kept}
        self._reasons = {key: text for key, text in self._reasons.items() if key in kept}
