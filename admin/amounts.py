"""Money and dates as forms have them, exact: nano-units and epoch seconds, no floats of money."""

import datetime
import re
from decimal import Decimal

from admin.forms import Form

NANOS = 10**9
MAX_UNITS = 10**6
_MONEY = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def nanos_of(form: Form, name: str, per: int = 1) -> int | None:
    """A sum of money for `per` things as nano-units a thing; None where the field is empty or
    wrong."""
    text = form.text(name).replace(",", "").replace(" ", "")
    if not text:
        return None
    if not _MONEY.fullmatch(text):
        form.errors.setdefault(name, "A sum such as 25 or 0.15.")
        return None
    value = Decimal(text) * NANOS / per
    if value != value.to_integral_value():
        form.errors.setdefault(name, "Too exact: the last digit would be lost.")
        return None
    return int(value)


def text_of(nanos: int, per: int = 1) -> str:
    """The sum as `nanos_of` reads it."""
    text = f"{Decimal(nanos) * per / NANOS:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def day_of(form: Form, name: str) -> float | None:
    """Midnight (UTC) at the beginning of a day; None where the field is empty or wrong."""
    text = form.text(name)
    if not text:
        return None
    found = midnight(text)
    if found is None:
        form.errors.setdefault(name, "A day such as 2026-12-31.")
    return found


def midnight(text: str) -> float | None:
    """2026-12-31 -> epoch seconds; None where it is no day."""
    try:
        day = datetime.date.fromisoformat(text) if _DAY.fullmatch(text) else None
    except ValueError:
        day = None
    if day is None or not 1970 <= day.year < 2200:
        return None
    return datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC).timestamp()


def day_text(at: float) -> str:
    """The day that an instant lies in, in UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat()


def decimal_text(value: float) -> str:
    """A number as a field has it: without an exponent, twelve digits at most."""
    text = f"{Decimal(f'{value:.12g}'):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
