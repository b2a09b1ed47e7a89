"""Forms: fields with what was given and what is wrong with it.

A page builds a `Form` from its fields, reads values with `text`, `whole` and their kin, and shows
the same form again where `errors` has something: values stay as they were typed, each message
stands beside its field. What an operation refuses as a whole becomes `trouble`, above the fields.

Money and dates are exact: nano-units and epoch seconds, no floats of money.
"""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, TypeAlias

from admin.context.optimistic_lock import ChangedMeanwhile
from registry.errors import Forbidden, RegistryError

FieldKind: TypeAlias = Literal[
    "text", "password", "number", "select", "checkbox", "textarea", "date"
]

NANOS = 10**9

_MONEY = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,12})?")


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `choices`: value -> label, of a select. `now`: what is in effect, shown below."""

    name: str
    label: str
    kind: FieldKind = "text"
    help: str = ""
    value: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    required: bool = False
    autocomplete: str = "off"
    placeholder: str = ""
    now: str = ""
    unit: str = ""
    suggestions: Sequence[str] | Mapping[str, str] = ()
    """Values that are offered; what each is called, where they are a mapping."""
    max_length: int = 256


@dataclass(slots=True)
class Form:
    """Fields of one page, filled with what came, if anything came."""

    fields: tuple[Field, ...]
    given: Mapping[str, str] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    trouble: str = ""

    def value(self, name: str) -> str:
        """What stands in the field: as typed, or as it was filled in."""
        if self.given is not None:
            return self.given.get(name, "")
        return next(each.value for each in self.fields if each.name == name)

    def is_on(self, name: str) -> bool:
        """A checkbox."""
        return bool(self.value(name))

    def text(self, name: str) -> str:
        """Without blanks at its ends; an error where it is required and empty, or too long."""
        spec = next(each for each in self.fields if each.name == name)
        found = self.value(name).strip()
        if spec.required and not found:
            self.errors.setdefault(name, f"{spec.label} is required.")
        elif len(found) > spec.max_length:
            self.errors.setdefault(name, f"At most {spec.max_length} characters.")
        elif spec.kind == "select" and found not in spec.choices:
            self.errors.setdefault(name, "Choose an option from the list.")
        return found

    def whole(self, name: str, least: int = 0) -> int | None:
        """A whole number; None where the field is empty or wrong."""
        found = self.text(name).replace(",", "").replace(" ", "").replace("_", "")
        if not found:
            return None
        if not _WHOLE.fullmatch(found) or int(found) < least:
            self.errors.setdefault(name, f"Enter a whole number of at least {least}.")
            return None
        return int(found)

    def decimal(self, name: str, least: float = 0.0) -> float | None:
        """A number; None where the field is empty or wrong."""
        found = self.text(name).replace(",", "")
        if not found:
            return None
        if not _DECIMAL.fullmatch(found) or float(found) < least:
            self.errors.setdefault(name, f"Enter a number of at least {least:g}.")
            return None
        return float(found)

    @contextmanager
    def refusals(self, **fields: type[RegistryError]) -> Iterator[None]:
        """What an operation refuses inside stands beside the field that is named for that kind of
        error, else above the fields. Forbidden and ChangedMeanwhile go further."""
        try:
            yield
        except (Forbidden, ChangedMeanwhile):
            raise
        except RegistryError as error:
            for name, kind in fields.items():
                if isinstance(error, kind):
                    self.errors[name] = str(error)
                    return
            self.trouble = str(error)

    @property
    def first_wrong(self) -> str:
        """The field that is to be corrected first, in the form's order; "": none."""
        return next((each.name for each in self.fields if each.name in self.errors), "")

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong so far."""
        return not self.errors and not self.trouble


def nanos_of(form: Form, name: str, per: int = 1) -> int | None:
    """A sum of money for `per` things as nano-units a thing; None where the field is empty or
    wrong."""
    text = form.text(name).replace(",", "").replace(" ", "")
    if not text:
        return None
    if not _MONEY.fullmatch(text):
        form.errors.setdefault(name, "Enter an amount such as 25 or 0.15.")
        return None
    value = Decimal(text) * NANOS / per
    if value != value.to_integral_value():
        form.errors.setdefault(name, "Too many decimal places.")
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
        form.errors.setdefault(name, "Enter a day such as 2026-12-31.")
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
