"""Jinja2 as the pages use it: everything escaped, nothing undefined, filters for people.

Sizes in binary units, money in the operator's currency, times relative with the exact one on
hover, numbers in groups. Templates are read once.
"""

import datetime
import math
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup
from starlette.templating import Jinja2Templates

from admin.context.policy.permissions import allowed, tenants_allowed
from admin.context.registration_files import PHASES
from admin.rendering.icons import PATHS
from admin.rendering.model_colours import ModelColours
from gateway.dispatch.policy.reasons import OUTCOMES

FOLDER = Path(__file__).parents[1] / "templates"
_NANOS = 10**9
_DECIMALS = 9
SIGNIFICANT = 3
"""Digits of a sum below one unit."""
_STEPS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


class Templates(Jinja2Templates):
    """Starlette's, over this environment."""

    def __init__(self, colours: ModelColours, folder: Path = FOLDER) -> None:
        self.colours = colours
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        figures = (size, number, money, price, per_million, span, percent)
        filters = (*figures, ago, browser, exact, path, codes, hint)
        environment.filters.update({each.__name__: each for each in filters})
        environment.filters["colour"] = colours.classes
        environment.globals.update(may=may, may_any=may_any, icon_paths=PATHS)
        environment.globals.update(outcomes=OUTCOMES, phases=PHASES)
        super().__init__(env=environment)

    def macro(self, name: str, macro: str, *arguments: object) -> str:
        """What one macro of a template says."""
        module = self.env.get_template(name).make_module({})
        return str(getattr(module, macro)(*arguments))


def size(num_bytes: float | None) -> str:
    """1536 -> 1.5 KiB."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number(value: float | None, digits: int = 0) -> str:
    """12345.6 -> 12,346 (in groups, as money is)."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """0.123 -> 12 %."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def money(nanos: int | None, currency: str, digits: int = 2) -> str:
    """Nano-units as money, with at least so many decimals; small sums keep SIGNIFICANT digits:
    4_200_000 -> USD 0.0042."""
    if nanos is None:
        return "-"
    value = Decimal(nanos) / _NANOS
    shown = digits
    if 0 < abs(value) < 1:
        shown = max(digits, min(_DECIMALS, SIGNIFICANT - 1 - value.adjusted()))
    whole, _, decimals = f"{value:,.{shown}f}".partition(".")
    decimals = decimals[:digits] + decimals[digits:].rstrip("0")
    return f"{currency} {whole}.{decimals}" if decimals else f"{currency} {whole}"


def price(record: Any, task: str) -> str:
    """A PriceRecord of a million tokens, in and out; an encoder has one price."""
    if record is None:
        return "-"
    if task != "generate":
        return per_million(record.embedding_nanos)
    return f"{per_million(record.prompt_nanos)} / {per_million(record.completion_nanos)}"


def per_million(nanos: int | Decimal) -> str:
    """Nano-units a token as units per million tokens, to a millionth of a unit."""
    return f"{nanos / 1000:,.6f}".rstrip("0").rstrip(".") if nanos else "free"


def span(seconds: float | None) -> str:
    """How long: 0.034 -> 34 ms, 90 -> 1.5 min."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    for step, unit in _STEPS:
        if seconds >= step:
            value = seconds / step
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.3g} {unit}"
    return "-"


def exact(at: float | None) -> str:
    """An instant, to the second, in UTC."""
    if at is None:
        return "-"
    when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def ago(at: float | None, now_at: float) -> Markup:
    """A <time>: relative to read, exact on hover."""
    if at is None:
        return Markup("-")
    since_s = now_at - at
    whole = next((f"{int(abs(since_s) // s)} {u}" for s, u in _STEPS if abs(since_s) >= s), "")
    text = "now" if not whole else f"{whole} ago" if since_s > 0 else f"in {whole}"
    stamp = datetime.datetime.fromtimestamp(at, datetime.UTC)
    shape = '<time datetime="{}" title="{}">{}</time>'
    return Markup(shape).format(f"{stamp:%Y-%m-%dT%H:%M:%SZ}", exact(at), text)


def browser(agent: str) -> str:
    """A browser's own description in a few words: which one, on what."""
    known = ("Edg", "OPR", "Firefox", "Chrome", "Safari")
    systems = ("Android", "iPhone", "iPad", "Windows", "Mac OS", "Linux")
    name = next((each for each in known if f"{each}/" in agent), "")
    system = next((each for each in systems if each in agent), "")
    shown = {"Edg": "Edge", "OPR": "Opera"}.get(name, name)
    return " on ".join(filter(None, (shown, system))) or agent[:40] or "-"


def codes(text: str) -> Markup:
    """A sentence whose `words in backticks` are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one stands alone
        return Markup.escape(text)
    shape = Markup("<code>{}</code>")
    return Markup("").join(
        shape.format(part) if number % 2 else part for number, part in enumerate(parts)
    )


def hint(value: str, name: str) -> str:
    """A setting's value for people: a size, a long duration; "" for others."""
    kind = name.rpartition("_")[2]
    if kind not in ("bytes", "s") or not value.replace(".", "", 1).isdigit():
        return ""
    amount = float(value)
    if kind == "bytes":
        return size(amount) if amount >= 1024 else ""
    return span(amount) if amount >= 120 else ""


def path(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


def may(me: Any, verb: Any, tenant_id: str = "") -> bool:
    """Whether to show a button; the verb itself asks again."""
    return me is not None and allowed(me.operator.grants, verb, tenant_id)


def may_any(me: Any, verb: Any) -> bool:
    """Whether there is anything to see in a list."""
    found = None if me is None else tenants_allowed(me.operator.grants, verb)
    return me is not None and (found is None or bool(found))
