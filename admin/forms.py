"""Forms: fields with what was given and what is wrong with it.

A page builds a `Form` from its fields, reads values with `text`, `whole` and their kin, and shows
the same form again where `errors` has something: values stay as they were typed, each message
stands beside its field. What a verb refuses as a whole becomes `trouble`, above the fields.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FieldKind: TypeAlias = Literal[
    "text", "password", "number", "select", "checkbox", "textarea", "date"
]

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
    suggestions: Sequence[str] = ()
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
            self.errors.setdefault(name, f"{spec.label} is needed.")
        elif len(found) > spec.max_length:
            self.errors.setdefault(name, f"At most {spec.max_length} characters.")
        elif spec.kind == "select" and found not in spec.choices:
            self.errors.setdefault(name, "Choose one of the list.")
        return found

    def whole(self, name: str, least: int = 0) -> int | None:
        """A whole number; None where the field is empty or wrong."""
        found = self.text(name).replace(",", "").replace(" ", "").replace("_", "")
        if not found:
            return None
        if not _WHOLE.fullmatch(found) or int(found) < least:
            self.errors.setdefault(name, f"A whole number from {least} up.")
            return None
        return int(found)

    def decimal(self, name: str, least: float = 0.0) -> float | None:
        """A number; None where the field is empty or wrong."""
        found = self.text(name).replace(",", "")
        if not found:
            return None
        if not _DECIMAL.fullmatch(found) or float(found) < least:
            self.errors.setdefault(name, f"A number from {least:g} up.")
            return None
        return float(found)

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong so far."""
        return not self.errors and not self.trouble
