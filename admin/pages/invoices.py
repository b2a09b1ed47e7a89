"""Invoices: those that were issued, as files; a month's preview, and issuing it."""

import re

from admin.amounts import day_text
from admin.ask import PREFIX, Ask, PageRoute, Reply
from admin.errors import Refused
from admin.forms import Field, Form
from admin.tables import Column, TableSpec, table_state
from admin.templating import path
from gateway.billing.invoice import Document, money
from gateway.service import invoices as verbs
from gateway.service.control import require
from registry.errors import Forbidden, NotFound, RegistryError

MEDIA = {"pdf": "application/pdf", "html": "text/html; charset=utf-8", "json": "application/json"}
TABLE = TableSpec(
    columns=(
        Column("Number", "number", first="down"),
        Column("Tenant"),
        Column("Month"),
        Column("Issued"),
        Column("Total", kind="number"),
        Column("Files", kind="action"),
    ),
    default_sort="-number",
    search="Number or tenant",
)
_NUMBER = re.compile(r"[^A-Za-z0-9._-]")


def show(ask: Ask) -> Reply:
    """Newest first; of one tenant where the address names it."""
    return _page(ask, _form(ask))


def preview(ask: Ask) -> Reply:
    """What would stand on it now; nothing is stored."""
    form = _form(ask, given=True)
    tenant, month = form.text("tenant"), form.text("month")
    document = None
    if form.is_sound:
        try:
            document = verbs.preview_invoice(ask.control, tenant, verbs.month_of(month))
        except Forbidden:
            raise
        except NotFound as error:
            form.errors["tenant"] = str(error)
        except RegistryError as error:
            form.trouble = str(error)
    return _page(ask, form, document, 200 if document else 422)


def issue(ask: Ask) -> Reply:
    """For ever: an invoice is never changed."""
    require(ask.control, "usage.write")
    form = _form(ask, given=True)
    tenant, month = form.text("tenant"), form.text("month")
    details = form.text("details").replace("\r\n", "\n")
    if form.is_sound:
        try:
            made = verbs.create_invoice(ask.control, tenant, verbs.month_of(month), details)
        except NotFound as error:
            form.errors["tenant"] = str(error)
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(
                f"/invoices?tenant={path(made.tenant_id)}", f"{made.number} is issued."
            )
    return _page(ask, form, status=422)


def download(ask: Ask) -> Reply:
    """One as a file."""
    form = ask.params["form"]
    if form not in MEDIA:
        raise Refused(404, "There is no such format", "Choose PDF, HTML or JSON.")
    number = ask.params["number"]
    body = verbs.render_invoice(ask.control, number, form)
    name = f"{_NUMBER.sub('_', number)}.{form}"
    return Reply(body, media=MEDIA[form],
                 headers=[("content-disposition", f'attachment; filename="{name}"')])  # fmt: skip


def _page(ask: Ask, form: Form, document: Document | None = None, status: int = 200) -> Reply:
    table = table_state(TABLE, f"{PREFIX}/invoices", ask.query)
    tenant = ask.query.get("tenant", "")
    page, total = verbs.invoices_page(ask.control, tenant, table.search, table.cut)
    return ask.page(
        "invoices.html",
        status,
        table=table,
        page=page,
        total=total,
        form=form,
        document=document,
        said=money,
        month_text=lambda at: day_text(at)[:7],
    )


def _form(ask: Ask, given: bool = False) -> Form:
    this = day_text(ask.now_at)[:7]
    last = day_text(ask.now_at - 86_400 * int(day_text(ask.now_at)[8:]))[:7]
    fields = (
        Field("tenant", "Tenant", required=True, value=ask.query.get("tenant", ""),
              help="Name or id."),
        Field("month", "Month", required=True, value=last, max_length=7,
              help=f"Such as {this}; it can be issued when it is over."),
        Field("details", "The tenant's address", "textarea", max_length=2000,
              help="As it is to stand on the invoice; only for issuing."),
    )  # fmt: skip
    return Form(fields, ask.form if given else None)


ROUTES = (
    PageRoute("GET", "/invoices", show),
    PageRoute("POST", "/invoice/preview", preview),
    PageRoute("POST", "/invoice/issue", issue),
    PageRoute("GET", "/invoices/{number}/{form}", download),
)
