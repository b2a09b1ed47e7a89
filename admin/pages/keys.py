"""The list of API keys, and a new one, whose text is shown once."""

import hashlib
import hmac
from collections.abc import Sequence

from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.key_form import key_fields, read_key
from admin.tables import Column, Filter, TableSpec, table_state
from admin.templating import path
from gateway.policy.permissions import tenants_allowed
from gateway.service import key_list, tenants
from gateway.service import keys as verbs
from gateway.service.control import require
from registry.base import base32, random_token
from registry.errors import AlreadyExists, Forbidden, NotFound, RegistryError
from registry.key_list import STATES, KeyFilter

MAX_SUGGESTED = 200
ONCE = "once"
PUBLIC_ID_BYTES = 10
TABLE = TableSpec(
    columns=(
        Column("Key", "name"),
        Column("Tenant", "tenant"),
        Column("State"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Spent, 24 h", "cost", "number", "down"),
        Column("Expires", "expires"),
        Column("Since", "created", first="down"),
    ),
    default_sort="-created",
    filters=(Filter("state", "State", {state: state.capitalize() for state in STATES}),),
    search="Name, public id or tenant",
)


def list_keys(ask: Ask) -> Reply:
    """The page; `tenant` in the address: that tenant's alone."""
    table = table_state(TABLE, ask.incoming.path, ask.query)
    wanted = KeyFilter(table.search, table.chosen["state"])
    page, total, tenant = key_list.keys_page(
        ask.control, wanted, table.sort, table.cut, ask.query.get("tenant", "")
    )
    return ask.page("keys.html", table=table, page=page, total=total, tenant=tenant)


def show_add(ask: Ask) -> Reply:
    """An empty form."""
    form = _form(ask, ask.query.get("tenant", ""))
    return ask.page("key_add.html", form=form, tenant=ask.query.get("tenant", ""))


def add(ask: Ask) -> Reply:
    """A new key. Its text is on this answer and nowhere else: no redirect. The form makes one key,
    whose public id comes of the form's own mark: sent again, it leads to that key."""
    form = _form(ask)
    public_id = _public_id(ask, form.text(ONCE))
    name, tenant = form.text("name"), form.text("tenant")
    bounds = read_key(form, ask.now_at)
    if form.is_sound:
        try:
            key, plaintext = verbs.create_key(
                ask.control,
                tenant,
                name,
                cache=bounds.cache,
                scopes=bounds.scopes,
                allowed_models=bounds.allowed_models,
                expires_in_s=None
                if bounds.expires_at is None
                else bounds.expires_at - ask.control.clock(),
                allowed_cidrs=bounds.allowed_cidrs,
                public_id=public_id,
            )
        except Forbidden:
            raise
        except NotFound as error:
            form.errors["tenant"] = str(error)
        except AlreadyExists:
            made = verbs.show_key(ask.control, public_id)
            note = "This form has made its key already, and its text was shown: rotate a lost one."
            return ask.redirect(f"/keys/{path(made.id)}", note)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.page("key_made.html", key=key, plaintext=plaintext, rotated=False)
    return ask.page("key_add.html", 422, form=form, tenant=tenant)


def _form(ask: Ask, tenant: str = "") -> Form:
    """Raises Forbidden for who may make no key at all."""
    writable = tenants_allowed(ask.control.grants, "keys.write")
    if writable is not None and not writable:
        require(ask.control, "keys.write")
    names = _tenant_names(ask, writable)
    mark = Field(ONCE, "Form", value=random_token(10))
    fields = (*key_fields(ask, tenant or (names[0] if len(names) == 1 else ""), names), mark)
    return Form(fields, ask.form if ask.incoming.method == "POST" else None)


def _public_id(ask: Ask, once: str) -> str:
    """Of this session's form alone; "" where it has no mark."""
    digest = hmac.digest(ask.token.encode(), b"polyhost key" + once.encode(), hashlib.sha256)
    return base32(digest[:PUBLIC_ID_BYTES]) if once else ""


def _tenant_names(ask: Ask, writable: frozenset[str] | None) -> Sequence[str]:
    found = tenants.list_tenants(ask.control)
    names = [one.name for one in found if writable is None or one.id in writable]
    return names[:MAX_SUGGESTED]


ROUTES = (
    PageRoute("GET", "/keys", list_keys),
    PageRoute("GET", "/key/add", show_add),
    PageRoute("POST", "/key/add", add),
)
