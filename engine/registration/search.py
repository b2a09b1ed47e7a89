"""Finding models on a hub: `python -m engine.registration.main --search WORDS`.

One question to the hub (`hub.py`), its answer read (`hub_models.py`), and of each model found what
its type says about hosting it (`outlook.py`). Nothing is fetched, so nothing here is certain; an
inspection is. Reports a `found` line for each model, most downloads first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.registration.hub import MAX_FOUND, Hub, HubLimits
from engine.registration.hub_models import shown
from engine.registration.outlook import outlook

DEFAULT_LIMIT = 20
MAX_WORDS = 200

Report = Callable[..., Any]
"""Called with "found" and its fields."""


@dataclass(frozen=True, slots=True)
class Search:
    """What is looked for. `author`, `task`: the hub's organization and pipeline tag, or ""."""

    words: str
    limit: int = DEFAULT_LIMIT
    author: str = ""
    task: str = ""


def search(wanted: Search, limits: HubLimits, report: Report) -> None:
    """Report what is found. Raises RegistrationRefused."""
    for text in (wanted.words, wanted.author, wanted.task):
        if len(text) > MAX_WORDS or not text.isprintable():
            raise RegistrationRefused(
                "bad_search", f"search for at most {MAX_WORDS} printable characters"
            )
    limit = min(max(wanted.limit, 1), MAX_FOUND)
    try:
        found = Hub(limits).search(wanted.words, limit, wanted.author, wanted.task)
    except DownloadInterrupted as error:
        raise RegistrationRefused("network", f"{error}: try again later") from error
    for model in found:
        seen = outlook(model)
        report("found", hub=shown(model), verdict=seen.verdict, code=seen.code, reason=seen.reason)
