"""List prices: what each model costs, dated changes, and what one would have come to last month."""

from starlette.responses import Response

from admin.context.operator_context import require
from admin.operations import prices as verbs
from admin.operations.prices import Effect, PriceView
from admin.pages.three_way_merge import SEEN, merge, retried, setters_of, with_versions
from admin.rendering.templating import path
from admin.web.forms import Field, Form, day_of, nanos_of, text_of
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.errors import NotFound
from registry.money.prices import PRICE_NAMES, PriceRecord

MILLION = 10**6
DATED = "dated"
"""The mark of the dated prices that stood below the form."""
ENCODER_PRICES = {"embedding_nanos": ("Encoder tokens", MILLION)}
TEXT_PRICES = {
    "prompt_nanos": ("Input tokens", MILLION),
    "cached_nanos": ("Cached input tokens", MILLION),
    "completion_nanos": ("Output tokens", MILLION),
}
SECONDS = {
    "service_second_nanos": ("Service, per second", 1),
    "load_second_nanos": ("Loading, per second", 1),
}
MORE_PRICES = {**ENCODER_PRICES, **SECONDS}
_ENCODER_MORE = {**TEXT_PRICES, **SECONDS}
"""Field -> label, and for how many tokens or seconds the price is."""
TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("Input", "input", "number", "down"),
        Column("Cached input", "cached", "number", "down"),
        Column("Output", "output", "number", "down"),
        Column("Next change", "next"),
    ),
    default_sort="name",
    search="Model",
)


def list_prices(request: PageRequest) -> Response:
    """The page."""
    table = table_state(TABLE, request.path, request.query)
    page = verbs.prices_page(request.operator, table.search, table.sort, table.cut)
    return request.page("prices.html", table=table, page=page)


def show(request: PageRequest) -> Response:
    """One model's prices."""
    return _page(request, _view(request))


def preview(request: PageRequest) -> Response:
    """What last month would have been; nothing is set."""
    view = _view(request)
    require(request.operator, "prices.write")
    form = _form(request, view, given=True)
    if not _is_current(request, view, form):
        return _page(request, view, form, status=409)
    price, _ = _read(form, view, request.now_at)
    if form.is_sound:
        with form.refusals():
            return _page(request, view, form, verbs.price_effect_of(request.operator, price))
    return _page(request, view, form, status=422)


@retried
def set_price(request: PageRequest) -> Response:
    """From its day on, or as soon as every gateway knows of it."""
    view = _view(request)
    require(request.operator, "prices.write")
    form = _form(request, view, given=True)
    if not _is_current(request, view, form):
        return _page(request, view, form, status=409)
    price, valid_from = _read(form, view, request.now_at)
    if form.is_sound:
        with form.refusals():
            verbs.set_price(request.operator, price, valid_from, verbs.prices_mark(view.dated))
            return request.redirect(f"/prices/{path(view.model)}", "The price was set.")
    return _page(request, view, form, status=422)


def _page(
    request: PageRequest,
    view: PriceView,
    form: Form | None = None,
    effect: Effect | None = None,
    status: int = 200,
) -> Response:
    return request.page(
        "price.html",
        status,
        view=view,
        form=form or _form(request, view),
        effect=effect,
        main=TEXT_PRICES if view.task == "generate" else ENCODER_PRICES,
        more={**ENCODER_PRICES, **SECONDS} if view.task == "generate" else _ENCODER_MORE,
        used={name for price in view.dated for name in PRICE_NAMES if getattr(price, name)},
        amount=text_of,
    )


def withdraw(request: PageRequest) -> Response:
    """Take back a price that has not begun."""
    view = _view(request)
    require(request.operator, "prices.write")
    wanted = request.fields.get("valid_from", "")
    scheduled = [price for price in view.dated if repr(price.valid_from) == wanted]
    if not scheduled:
        raise NotFound("this price does not exist any more")
    mark = request.fields.get(DATED, "")
    verbs.withdraw_price(request.operator, view.model, scheduled[0].valid_from, mark)
    note = "The scheduled price was withdrawn."
    return request.redirect(f"/prices/{path(view.model)}", note)


def _form(request: PageRequest, view: PriceView, given: bool = False) -> Form:
    currency = request.context.settings.currency
    prices = {**TEXT_PRICES, **MORE_PRICES}
    fields = [
        Field(name, label, "number", value=text_of(getattr(view.now, name), per),
              unit=currency + (" / 1M" if per > 1 else ""), required=True)
        for name, (label, per) in prices.items()
    ]  # fmt: skip
    help_text = "Start of that day (UTC). Leave empty to apply it as soon as all gateways have it."
    fields.append(Field("from", "Valid from", "date", help=help_text))
    mark = verbs.prices_mark(view.dated)
    fields.append(Field(DATED, "Prices seen", value=mark, max_length=16))
    return with_versions(Form(tuple(fields), request.fields if given else None))


def _is_current(request: PageRequest, view: PriceView, form: Form) -> bool:
    """Whether the prices are those that were seen; else the form says so and knows those of now."""
    by = setters_of(request, "price.set", view.model, {})
    mark = verbs.prices_mark(view.dated)
    seen = form.text(DATED)
    is_merged = merge(form, _form(request, view), by)
    form.given = {**(form.given or {}), DATED: mark}
    if seen and seen != mark:
        form.trouble = (
            "The prices were changed in the meantime, as shown below. Nothing was saved. "
            "Send the form again to set your price anyway."
        )
        form.given = {**form.given, SEEN: _form(request, view).value(SEEN)}
    return is_merged and form.is_sound


def amounts_of(form: Form) -> dict[str, int]:
    """Nano-units by the fields of PriceRecord; a field that is empty is free of charge."""
    fields = {**TEXT_PRICES, **MORE_PRICES}
    return {name: nanos_of(form, name, per) or 0 for name, (_, per) in fields.items()}


def _read(form: Form, view: PriceView, now_at: float) -> tuple[PriceRecord, float | None]:
    valid_from = day_of(form, "from")
    if valid_from is not None and valid_from <= now_at:
        form.errors.setdefault("from", "Choose a day in the future.")
    return PriceRecord(view.model, valid_from or now_at, **amounts_of(form)), valid_from


def _view(request: PageRequest) -> PriceView:
    """The model's prices that the path names. Raises NotFound."""
    return verbs.price_view(request.operator, request.path_params["name"])


ROUTES = (
    PageRoute("GET", "/prices", list_prices),
    PageRoute("GET", "/prices/{name:path}", show),
    PageRoute("POST", "/price/preview/{name:path}", preview),
    PageRoute("POST", "/price/set/{name:path}", set_price),
    PageRoute("POST", "/price/withdraw/{name:path}", withdraw),
)
