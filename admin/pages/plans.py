"""Price plans: all, a new one, and one: its discounts and own prices by date, and who has it. Which
plan a tenant has is set on the tenant's page."""

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import TypeAlias

from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import prices as verbs
from admin.operations.prices import PlanView
from admin.pages.prices import MILLION, MORE_PRICES, TEXT_PRICES, amounts_of
from admin.rendering.templating import path
from admin.web.forms import Field, Form, day_of, text_of
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.errors import AlreadyExists, NotFound
from registry.money.plans import PlanDiscount, PlanPrice, TenantTerms
from registry.money.prices import PriceRecord

SEEN = "seen"
MAX_PERCENT = 100
TABLE = TableSpec(
    columns=(
        Column("Plan", "name"),
        Column("Discount off list prices", "discount", "number", "down"),
        Column("Own prices", "prices", "number", "down"),
        Column("Tenants", "tenants", "number", "down"),
    ),
    default_sort="name",
)
VALUES: Mapping[str, Callable[[PlanView], str | float]] = {
    "name": lambda plan: plan.name,
    "discount": lambda plan: plan.discount_bp,
    "prices": lambda plan: len({each.model for each in plan.prices}),
    "tenants": lambda plan: plan.num_tenants,
}
Dated: TypeAlias = PriceRecord | PlanDiscount | PlanPrice | TenantTerms
FROM_HELP = "Start of that day (UTC). Leave empty to apply it as soon as all gateways have it."


def list_plans(request: PageRequest) -> Response:
    """The page."""
    return _list(request, _new_form(None))


def add(request: PageRequest) -> Response:
    """A new plan; its prices are set on its page."""
    require(request.operator, "prices.write")
    form = _new_form(request)
    name, discount = form.text("name"), discount_of(form)
    if name == "none":
        form.errors["name"] = "This name means no plan. Choose another."
    if form.is_sound:
        with form.refusals(name=AlreadyExists):
            verbs.create_plan(request.operator, name, discount)
            return request.redirect(f"/plans/{path(name)}", "The plan was created.")
    return _list(request, form, 422)


def show(request: PageRequest) -> Response:
    """One plan."""
    return _page(request, _view(request))


def set_discount(request: PageRequest) -> Response:
    """Off list prices, from its date on."""
    view = _view(request)
    require(request.operator, "prices.write")
    form = _discount_form(view, request)
    discount, valid_from = discount_of(form), start_of(form, request.now_at)
    if form.is_sound:
        try:
            with form.refusals():
                verbs.set_plan_discount(
                    request.operator, view.name, discount, valid_from, form.text(SEEN)
                )
                return request.redirect(f"/plans/{path(view.name)}", "The discount was set.")
        except ChangedMeanwhile as error:
            view = _view(request)
            return _page(request, view, of_discount=_again(form, view, error), status=409)
    return _page(request, view, of_discount=form, status=422)


def set_price(request: PageRequest) -> Response:
    """The plan's own price of a model, or its end."""
    view = _view(request)
    require(request.operator, "prices.write")
    form = _price_form(request, view, given=True)
    model, valid_from = form.text("model"), start_of(form, request.now_at)
    price = None
    if "end" not in request.fields:
        price = PriceRecord(model, 0.0, **amounts_of(form))
    if form.is_sound:
        try:
            with form.refusals(model=NotFound):
                verbs.set_plan_price(
                    *(request.operator, view.name, model, price, valid_from, form.text(SEEN))
                )
                done = "The price was set." if price else "The list price applies again."
                return request.redirect(f"/plans/{path(view.name)}", done)
        except ChangedMeanwhile as error:
            view = _view(request)
            return _page(request, view, of_price=_again(form, view, error), status=409)
    return _page(request, view, of_price=form, status=422)


def withdraw(request: PageRequest) -> Response:
    """Take back a discount or an own price that has not begun."""
    require(request.operator, "prices.write")
    view = _view(request)
    model = request.fields.get("model", "")
    entries = view.discounts if not model else [x for x in view.prices if x.model == model]
    verbs.withdraw_plan_entry(
        *(request.operator, view.name, model, scheduled(request, entries)),
        seen=request.fields.get(SEEN, ""),
    )
    return request.redirect(f"/plans/{path(view.name)}", "The scheduled change was withdrawn.")


def scheduled(request: PageRequest, entries: Iterable[Dated]) -> float:
    """When the entry begins that the form names. Raises NotFound where there is none."""
    wanted = request.fields.get("valid_from", "")
    for each in entries:
        if repr(each.valid_from) == wanted:
            return each.valid_from
    raise NotFound("this entry does not exist any more")


def discount_of(form: Form) -> int:
    """Basis points of the percentage in `discount`; errors are in the form."""
    value = form.decimal("discount") or 0.0
    points = Decimal(str(value)) * MAX_PERCENT
    if value > MAX_PERCENT or points != points.to_integral_value():
        form.errors.setdefault("discount", "Enter 0 to 100 in steps of 0.01.")
        return 0
    return int(points)


def start_of(form: Form, now_at: float) -> float | None:
    """The day in `from`; None: at once."""
    valid_from = day_of(form, "from")
    if valid_from is not None and valid_from <= now_at:
        form.errors.setdefault("from", "Choose a day in the future.")
    return valid_from


def discount_text(discount_bp: int) -> str:
    """As `discount_of` reads it."""
    return text_of(discount_bp * 10**7)


def terms_form(
    request: PageRequest, terms: list[TenantTerms], current: TenantTerms | None, given: bool = False
) -> Form:
    """A tenant's plan and own discount."""
    names = [plan.name for plan in verbs.list_plans(request.operator)]
    fields = (
        Field("plan", "Plan", "select", value=current.plan if current else "",
              choices={"": "None: list prices", **{name: name for name in names}}),
        Field("discount", "Own discount", "number", unit="%",
              value=discount_text(current.discount_bp) if current else "0",
              help="Off the plan's prices, for this tenant only."),
        Field("from", "Valid from", "date", help=FROM_HELP),
        Field(SEEN, "Seen", value=verbs.dated_mark(terms)),
    )  # fmt: skip
    return Form(fields, request.fields if given else None)


def _again(form: Form, view: PlanView, error: ChangedMeanwhile) -> Form:
    """What was typed, beside what holds now; sent again it goes on top of that."""
    mark = verbs.dated_mark([*view.discounts, *view.prices])
    form.given = {**(form.given or {}), SEEN: mark}
    form.trouble = (
        f"{str(error).capitalize()}. Look at the plan below; send again to set it anyway."
    )
    return form


def _view(request: PageRequest) -> PlanView:
    """The plan that the path names. Raises NotFound."""
    return verbs.plan_view(request.operator, request.path_params["name"])


def _list(request: PageRequest, form: Form, status: int = 200) -> Response:
    table = table_state(TABLE, f"{PREFIX}/plans", request.query)
    plans = verbs.list_plans(request.operator)
    page = table.cut_rows(plans, VALUES, lambda plan: plan.name)
    return request.page(
        "plans.html", status, table=table, page=page, form=form, discount=discount_text
    )


def _page(
    request: PageRequest,
    view: PlanView,
    of_discount: Form | None = None,
    of_price: Form | None = None,
    status: int = 200,
) -> Response:
    held: dict[str, tuple[str, TenantTerms]] = {}
    for name, terms in verbs.list_terms(request.operator):
        if terms.valid_from <= request.now_at:
            held[terms.tenant_id] = name, terms
    return request.page(
        "plan.html",
        status,
        view=view,
        tenants=[each for each in held.values() if each[1].plan == view.name],
        of_discount=of_discount or _discount_form(view),
        of_price=of_price or _price_form(request, view),
        discount=discount_text,
        tokens=TEXT_PRICES,
        more=MORE_PRICES,
        per_million=lambda nanos: text_of(nanos, MILLION),
    )


def _new_form(request: PageRequest | None) -> Form:
    fields = (
        Field("name", "Name", required=True, max_length=128),
        Field("discount", "Discount off list prices", "number", value="0", unit="%"),
    )
    return Form(fields, request.fields if request else None)


def _discount_form(view: PlanView, request: PageRequest | None = None) -> Form:
    last = discount_text(view.discounts[-1].discount_bp) if view.discounts else "0"
    fields = (
        Field("discount", "Discount off list prices", "number", required=True, value=last,
              unit="%"),
        Field("from", "Valid from", "date", help=FROM_HELP),
        Field(SEEN, "Seen", value=verbs.dated_mark([*view.discounts, *view.prices])),
    )  # fmt: skip
    return Form(fields, request.fields if request else None)


def _price_form(request: PageRequest, view: PlanView, given: bool = False) -> Form:
    currency = request.context.settings.currency
    prices = {**TEXT_PRICES, **MORE_PRICES}
    fields = [Field("model", "Model", required=True, max_length=128)]
    fields += [
        Field(name, label, "number", unit=currency + (" / 1M" if per > 1 else ""))
        for name, (label, per) in prices.items()
    ]
    fields.append(Field("from", "Valid from", "date", help=FROM_HELP))
    seen = verbs.dated_mark([*view.discounts, *view.prices])
    fields.append(Field(SEEN, "Seen", value=seen))
    return Form(tuple(fields), request.fields if given else None)


ROUTES = (
    PageRoute("GET", "/plans", list_plans),
    PageRoute("POST", "/plan/add", add),
    PageRoute("GET", "/plans/{name}", show),
    PageRoute("POST", "/plan/discount/{name}", set_discount),
    PageRoute("POST", "/plan/price/{name}", set_price),
    PageRoute("POST", "/plan/withdraw/{name}", withdraw),
)
