"""The form of a tenant's floor: which models are its own, and how much of them stays on workers."""

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Final

from admin.ask import Ask
from admin.forms import Field, Form
from admin.merged_form import merge, with_marks
from gateway.service import tenants as verbs
from gateway.service.meanwhile import ChangedMeanwhile, who_set
from gateway.service.tenant_list import TenantView
from registry.errors import RegistryError

GIB: Final = 1 << 30
MAX_LIST_LEN: Final = 9000
FIELDS: Final = {"size": "size_bytes", "models": "models"}
"""Of the form, and what the audit log calls them."""


def floor_form(ask: Ask, view: TenantView, given: bool = False) -> Form:
    """As it stands; `given`: as it was sent."""
    fields = (
        Field(
            "size",
            "Stays on each worker",
            "number",
            value=_gib_text(view.floor.size_bytes if view.floor else 0),
            unit="GiB",
            placeholder="nothing",
            help="Of the models beside it, where a worker has so much of them. As large as a "
            "device: nobody else's model is loaded there meanwhile. Empty both: no floor.",
        ),
        Field(
            "models",
            "Its models",
            "textarea",
            value="\n".join(view.floor.models) if view.floor else "",
            placeholder="none",
            help="Names, one a line. A model may be several tenants'.",
            max_length=MAX_LIST_LEN,
        ),
    )
    return with_marks(Form(fields, ask.form if given else None))


def store(ask: Ask, view: TenantView, form: Form) -> int:
    """The status: 200 where it was done, else the form says why not. Raises ChangedMeanwhile where
    somebody else was quicker by a moment."""
    if not merge(form, floor_form(ask, view), lambda names: _who_set(ask, view, names)):
        return 409
    size, names = form.decimal("size"), form.text("models").replace(",", " ").split()
    if size is None and names:
        form.errors.setdefault("size", "How much of them? 0 takes the floor away.")
    elif size and not names:
        form.errors.setdefault("models", "Which are the tenant's?")
    if not form.is_sound:
        return 422
    seen = verbs.floor_mark(view.floor)
    try:
        verbs.set_model_floor(ask.control, view.tenant.id, round((size or 0) * GIB), names, seen)
    except ChangedMeanwhile:
        raise
    except RegistryError as error:
        form.trouble = str(error)
        return 422
    return 200


def _who_set(ask: Ask, view: TenantView, names: Collection[str]) -> Mapping[str, str]:
    """By the fields of the form."""
    told = {name: FIELDS[name] for name in names}
    by = who_set(ask.control, "tenant.floor", view.tenant.id, set(told.values()))
    return {name: by[field] for name, field in told.items()}


def _gib_text(size_bytes: int) -> str:
    """To the byte."""
    return f"{Decimal(size_bytes) / GIB:.12f}".rstrip("0").rstrip(".") if size_bytes else ""
