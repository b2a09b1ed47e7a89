"""A model's last hours as one of three pictures: requests, tokens, times to the first token.

The table beside them has all figures; which picture is shown stands in the address (`show`).
"""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from admin import charts
from admin.templating import number, span
from registry.model_list import Hour

PICTURES: Final = {
    "requests": "Requests by hour",
    "tokens": "Tokens by hour",
    "first": "First token by hour",
}
"""The first is shown where the address says nothing of ours."""


def shown(wanted: str) -> str:
    """Which of PICTURES."""
    return wanted if wanted in PICTURES else next(iter(PICTURES))


def picture(hours: Sequence[Hour], name: str, show: str) -> Markup:
    """One of PICTURES, the oldest hour first."""
    make = {"requests": _requests, "tokens": _tokens, "first": _first_token}[show]
    return charts.bars([make(hour) for hour in hours], f"{PICTURES[show]} of {name}, the last 24")


def _bar(hour: Hour, value: float, text: str, bad: float = 0.0) -> charts.Bar:
    label = charts.hour_label(hour.at)
    return charts.Bar(label, value, bad, f"{label} UTC: {text}")


def _requests(hour: Hour) -> charts.Bar:
    text = f"{number(hour.num_requests)} requests, {number(hour.num_failed)} failed"
    return _bar(hour, hour.num_requests, text, hour.num_failed)


def _tokens(hour: Hour) -> charts.Bar:
    text = f"{number(hour.prompt_tokens)} tokens in, {number(hour.completion_tokens)} out"
    return _bar(hour, hour.prompt_tokens + hour.completion_tokens, text)


def _first_token(hour: Hour) -> charts.Bar:
    """In milliseconds: the mean, for the roll-ups know no more."""
    mean_s = hour.ttft_s / hour.num_requests if hour.num_requests else 0.0
    text = f"{span(mean_s)} on average" if hour.num_requests else "no request"
    return _bar(hour, 1000 * mean_s, text)
