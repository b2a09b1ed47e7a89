"""Invoices: those that were issued, as files; a month's preview, and issuing it."""

import re

from starlette.responses import Response

from admin.billing.invoice_document import Document, money
from admin.context.operator_context import require
from admin.operations import invoices as verbs
from admin.rendering.templating import path
from admin.web.errors import Refused
from admin.web.forms import Field, Form, day_text
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.errors import NotFound

MEDIA = {"pdf": "application/pdf", "html": "text/html; charset=utf-8", "json": "application/json"}
TABLE = TableSpec(
    columns=(
        Column("Number", "number", first="down"),
        Column("Tenant", "tenant"),
        Column("Month", "month", first="down"),
        Column("Issued"),
        Column("Total", "total", "number", "down"),
        Column("Files", kind="action"),
    ),
    default_sort="-number",
    search="Number or tenant",
)
MAX_MONTHS = 36
_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")
_NUMBER = re.compile(r"[^A-Za-z0-9._-]")


def show(request: PageRequest) -> Response:
    """Newest first; of one tenant where the address names it."""
    return _page(request, _form(request))


def preview(request: PageRequest) -> Response:
    """What would stand on it now; nothing is stored."""
    form = _form(request, given=True)
    tenant, month = form.text("tenant"), form.text("month")
    document = None
    if form.is_sound:
        with form.refusals(tenant=NotFound):
            document = verbs.preview_invoice(request.operator, tenant, verbs.month_of(month))
    return _page(request, form, document, 200 if document else 422)


def issue(request: PageRequest) -> Response:
    """For ever: an invoice is never changed."""
    require(request.operator, "usage.write")
    form = _form(request, given=True)
    tenant, month = form.text("tenant"), form.text("month")
    details = form.text("details").replace("\r\n", "\n")
    if form.is_sound:
        with form.refusals(tenant=NotFound):
            made = verbs.create_invoice(request.operator, tenant, verbs.month_of(month), details)
            return request.redirect(
                f"/invoices?tenant={path(made.tenant_id)}", f"Invoice {made.number} was issued."
            )
    return _page(request, form, status=422)


def preview_all(request: PageRequest) -> Response:
    """What would be issued to whom; nothing is stored."""
    form = _form(request, given=True)
    month = form.text("month")
    if not form.is_sound:
        return _page(request, form, status=422)
    with form.refusals():
        every = verbs.preview_all(request.operator, verbs.month_of(month))
        return _page(request, form, every=every)
    return _page(request, form, status=422)


def issue_all(request: PageRequest) -> Response:
    """To every tenant with charges."""
    require(request.operator, "usage.write")
    form = _form(request, given=True)
    month = form.text("month")
    if form.is_sound:
        with form.refusals():
            made = verbs.create_all(request.operator, verbs.month_of(month))
            many = f"{len(made)} invoice{'' if len(made) == 1 else 's'}"
            return request.redirect("/invoices", f"Issued {many} for {month}.")
    return _page(request, form, status=422)


def download(request: PageRequest) -> Response:
    """One as a file."""
    form = request.path_params["form"]
    if form not in MEDIA:
        raise Refused(404, "Unknown format", "Choose PDF, HTML or JSON.")
    number = request.path_params["number"]
    body = verbs.render_invoice(request.operator, number, form)
    name = f"{_NUMBER.sub('_', number)}.{form}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(body, headers=headers, media_type=MEDIA[form])


def _page(
    request: PageRequest,
    form: Form,
    document: Document | None = None,
    status: int = 200,
    every: list[Document] | None = None,
) -> Response:
    table = table_state(TABLE, f"{PREFIX}/invoices", request.query)
    tenant = request.query.get("tenant", "")
    page, total = verbs.invoices_page(
        *(request.operator, tenant, table.search, table.cut),
        table.sort,  # type: ignore[arg-type]  # one of the table's
    )
    return request.page(
        "invoices.html",
        status,
        table=table,
        page=page,
        total=total,
        form=form,
        document=document,
        every=every,
        is_over=lambda month: month < day_text(request.now_at)[:7],
        said=money,
        month_text=lambda at: day_text(at)[:7],
    )


def _form(request: PageRequest, given: bool = False) -> Form:
    this = day_text(request.now_at)[:7]
    months = [this]
    while len(months) < MAX_MONTHS and months[-1] > "1970-01":
        months.append(day_text(verbs.month_of(months[-1]).began_at - 1)[:7])
    wanted = request.fields.get("month", "")
    if _MONTH.fullmatch(wanted) and wanted not in months:
        months.append(wanted)  # an earlier one, from a program
    last, choices = months[1], {each: each for each in months} | {this: f"{this} (not over yet)"}
    fields = (
        Field("tenant", "Tenant", required=True, value=request.query.get("tenant", ""),
              help="Name or id."),
        Field("month", "Month", "select", required=True, value=last, choices=choices,
              help="An invoice can be issued after the month has ended."),
        Field("details", "The tenant's address", "textarea", max_length=2000,
              help="Printed on the invoice when it is issued."),
    )  # fmt: skip
    return Form(fields, request.fields if given else None)


ROUTES = (
    PageRoute("GET", "/invoices", show),
    PageRoute("POST", "/invoice/preview", preview),
    PageRoute("POST", "/invoice/issue", issue),
    PageRoute("POST", "/invoice/preview-all", preview_all),
    PageRoute("POST", "/invoice/issue-all", issue_all),
    PageRoute("GET", "/invoices/{number}/{form}", download),
)
