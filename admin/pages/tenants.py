"""The list of tenants, and a new one."""

from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.tables import Column, Filter, TableSpec, table_state
from admin.templating import path
from gateway.service import tenant_list
from gateway.service import tenants as verbs
from gateway.service.control import require
from registry.errors import AlreadyExists, RegistryError
from registry.tenant_list import TenantFilter

PRIORITIES = {"interactive": "Interactive", "standard": "Standard", "batch": "Batch"}
TABLE = TableSpec(
    columns=(
        Column("Tenant", "name"),
        Column("State"),
        Column("Weight", "weight", "number", "down"),
        Column("Keys", "keys", "number", "down"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Spent, 24 h", "cost", "number", "down"),
        Column("Since", "created", first="down"),
    ),
    default_sort="-cost",
    filters=(
        Filter("state", "State", {"in": "Let in", "out": "Shut out"}),
        Filter("priority", "Priority", PRIORITIES),
    ),
    search="Name or id",
)


def list_tenants(ask: Ask) -> Reply:
    """The page."""
    table = table_state(TABLE, ask.incoming.path, ask.query)
    disabled = {"in": False, "out": True}.get(table.chosen["state"])
    wanted = TenantFilter(table.search, table.chosen["priority"], disabled)
    page, counts = tenant_list.tenants_page(ask.control, wanted, table.sort, table.cut)
    return ask.page("tenants.html", table=table, page=page, counts=counts)


def show_add(ask: Ask) -> Reply:
    """An empty form."""
    require(ask.control, "tenants.write")
    return ask.page("tenant_add.html", form=_form())


def add(ask: Ask) -> Reply:
    """A new tenant; its page is where keys and limits are made."""
    require(ask.control, "tenants.write")
    form = _form(ask)
    name, weight = form.text("name"), form.decimal("weight")
    if form.is_sound:
        try:
            made = verbs.create_tenant(ask.control, name, weight or 0.0)
        except AlreadyExists as error:
            form.errors["name"] = str(error)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(f"/tenants/{path(made.id)}", "The tenant is there. It needs a key.")
    return ask.page("tenant_add.html", 422, form=form)


def _form(ask: Ask | None = None) -> Form:
    fields = (
        Field("name", "Name", required=True, max_length=128),
        Field(
            "weight",
            "Weight",
            "number",
            required=True,
            value="1",
            help="Its share of the service against other tenants': 2 gets twice what 1 gets.",
        ),
    )
    return Form(fields, ask.form if ask else None)


ROUTES = (
    PageRoute("GET", "/tenants", list_tenants),
    PageRoute("GET", "/tenant/add", show_add),
    PageRoute("POST", "/tenant/add", add),
)
