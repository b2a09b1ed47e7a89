"""A form whose fields somebody else may have changed since it was shown: field by field.

The form carries a mark of what each field showed (`SEEN`). What its sender left as it was takes
what holds now; what both changed is a clash: nothing is done, the form says who set what, keeps
what was typed, and sent again that replaces it. That nothing comes between this and the change is
the verb's to see to (admin/context/optimistic_lock.py).
"""

import functools
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from starlette.responses import Response

from admin.context.optimistic_lock import SOMEBODY, ChangedMeanwhile, who_set
from admin.web.forms import Field, Form
from admin.web.request import Page, PageRequest

SEEN: Final = "seen"
MAX_SHOWN: Final = 120
TRIES: Final = 3
"""How often a change is tried anew where others were a moment quicker."""
CLASH: Final = "Another user changed this in the meantime. Nothing was saved."
_PAIR: Final = re.compile(r"([a-z_]{1,40})=([0-9a-f]{12})")

WhoSet = Callable[[Collection[str]], Mapping[str, str]]
"""Names of fields -> who changed each of them last."""


def retried(page: Page) -> Page:
    """The page, tried anew where somebody else was quicker between its look and its change."""

    @functools.wraps(page)
    def run(request: PageRequest) -> Response:
        for _ in range(TRIES):
            with suppress(ChangedMeanwhile):
                return page(request)
        raise ChangedMeanwhile(CLASH)

    return run


def setters_of(request: PageRequest, action: str, target: str, fields: Mapping[str, str]) -> WhoSet:
    """By the audit log. `fields`: of the form, and what the log calls them, if something else."""

    def who(names: Collection[str]) -> Mapping[str, str]:
        logged = {name: fields.get(name, name) for name in names}
        by = who_set(request.operator, action, target, set(logged.values()))
        return {name: by[said] for name, said in logged.items()}

    return who


def with_versions(form: Form) -> Form:
    """The form as it is shown: with what its fields hold, for `merge` to know them by."""
    fields = tuple(field for field in form.fields if field.name != SEEN)
    text = _marks(Form(fields))
    form.fields = (*fields, Field(SEEN, "Seen", value=text, max_length=2000))
    return form


def merge(form: Form, now: Form, who_set: WhoSet) -> bool:
    """Fill what was given with what others have changed meanwhile. Whether there is no clash; else
    the form says what clashes. `now`: the same form, as it would be shown at this moment."""
    given = dict(form.given or {})
    seen = dict(_PAIR.findall(given.get(SEEN, "")))
    clashing: list[Field] = []
    others: list[Field] = []
    for field in now.fields:
        name = field.name
        if name not in seen or name == SEEN:
            continue
        mine, holds = _plain(form.value(name)), _plain(now.value(name))
        changed = _mark(name, holds) != seen[name]
        if _mark(name, mine) == seen[name]:
            given[name] = now.value(name)
            if changed:
                others.append(field)
        elif changed and mine != holds:
            clashing.append(field)
    form.given = given
    if not clashing:
        return True
    by = who_set([field.name for field in (*clashing, *others)])
    for field in clashing:
        who, said = by.get(field.name, SOMEBODY), _said(field, now)
        form.errors[field.name] = (
            f"{who} set {said} in the meantime. Send again to replace it with yours."
        )
    notes = {each.name: f"set by {by.get(each.name, SOMEBODY)} in the meantime" for each in others}
    form.fields = tuple(
        replace(each, now=notes[each.name]) if each.name in notes else each for each in now.fields
    )
    form.given = {**given, SEEN: _marks(now)}
    form.trouble = CLASH
    return False


def _said(field: Field, now: Form) -> str:
    """What holds, in words."""
    value = _plain(now.value(field.name))
    if field.kind == "checkbox":
        return "on" if value else "off"
    text = field.choices.get(value, value) or field.placeholder or "nothing"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _plain(value: str) -> str:
    """As it means the same: browsers end lines in their own way."""
    return " ".join(value.split())


def _marks(form: Form) -> str:
    pairs = ((each.name, _plain(form.value(each.name))) for each in form.fields)
    return " ".join(f"{name}={_mark(name, text)}" for name, text in pairs if name != SEEN)


def _mark(name: str, text: str) -> str:
    return hashlib.sha256(f"{name}={text}".encode()).hexdigest()[:12]
