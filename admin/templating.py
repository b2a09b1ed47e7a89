"""Jinja2 as the pages use it: everything escaped, nothing undefined, filters for people.

Sizes in binary units, money in the operator's currency, times relative with the exact one on
hover, numbers in groups. Templates are read once.
"""

import datetime
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from admin.icons import PATHS
from gateway.policy.permissions import allowed, tenants_allowed

FOLDER = Path(__file__).parent / "templates"
NUM_COLOURS = 8
NUM_HATCHES = 4
_NANOS = 10**9
_STEPS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


class Templates:
    """The environment."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folder),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(
            size=size,
            number=number,
            money=money,
            price=price,
            ago=ago,
            browser=browser,
            exact=exact,
            span=span,
            path=path,
            colour=colour,
            percent=percent,
        )
        self._environment.globals.update(may=may, may_any=may_any, icon_paths=PATHS)

    def render(self, name: str, context: Mapping[str, Any]) -> str:
        """A template's text."""
        return self._environment.get_template(name).render(context)

    def macro(self, name: str, macro: str, *arguments: object) -> str:
        """What one macro of a template says."""
        module = self._environment.get_template(name).make_module({})
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
    """Nano-units as money; less than the last digit shows is not called nothing."""
    if nanos is None:
        return "-"
    least = _NANOS // 10**digits
    if 0 < abs(nanos) < least:
        return f"< {currency} {least / _NANOS:.{digits}f}"
    return f"{currency} {nanos / _NANOS:,.{digits}f}"


def price(record: Any, task: str) -> str:
    """A PriceRecord of a million tokens, in and out; an encoder has one price."""
    if record is None:
        return "-"
    if task != "generate":
        return _per_million(record.embedding_nanos)
    return f"{_per_million(record.prompt_nanos)} / {_per_million(record.completion_nanos)}"


def _per_million(nanos: int) -> str:
    return f"{nanos / 1000:,.3f}".rstrip("0").rstrip(".") if nanos else "free"


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
    told = {"Edg": "Edge", "OPR": "Opera"}.get(name, name)
    return " on ".join(filter(None, (told, system))) or agent[:40] or "-"


def path(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


def colour(name: str) -> str:
    """The classes of a model's colour, and of its pattern: the same wherever it is shown."""
    number = hatch(name)
    return f"c{_shade(name)}" + (f" p{number}" if number else "")


def fill(name: str) -> str:
    """The same colour in a picture, without the pattern."""
    return f"fill-c{_shade(name)}"


def hatch(name: str) -> int:
    """Which pattern lies over a model's colour; 0 is none. Colours repeat after eight."""
    return zlib.crc32(name.encode()) // NUM_COLOURS % NUM_HATCHES


def _shade(name: str) -> int:
    return zlib.crc32(name.encode()) % NUM_COLOURS


def may(me: Any, verb: Any, tenant_id: str = "") -> bool:
    """Whether to show a button; the verb itself asks again."""
    return me is not None and allowed(me.control.grants, verb, tenant_id)


def may_any(me: Any, verb: Any) -> bool:
    """Whether there is anything to see in a list."""
    found = None if me is None else tenants_allowed(me.control.grants, verb)
    return me is not None and (found is None or bool(found))
