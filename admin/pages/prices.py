"""List prices: what each model costs, dated changes, and what one would have come to last month."""

from collections.abc import Collection, Mapping

from admin.amounts import day_of, nanos_of, text_of
from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.merged_form import SEEN, merge, with_marks
from admin.tables import Column, TableSpec, table_state
from admin.templating import path
from gateway.service import price_list
from gateway.service import prices as verbs
from gateway.service.control import require
from gateway.service.meanwhile import ChangedMeanwhile, who_set
from gateway.service.price_list import Effect, PriceView
from registry.errors import RegistryError
from registry.prices import PriceRecord

MILLION = 10**6
DATED = "dated"
"""The mark of the dated prices that stood below the form."""
TOKENS = {
    "prompt_nanos": "Prompt tokens",
    "cached_nanos": "Cached prompt tokens",
    "completion_nanos": "Answer tokens",
    "embedding_nanos": "An encoder's tokens",
}
SECONDS = {
    "service_second_nanos": "A second of service",
    "load_second_nanos": "A second of loading",
}
TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("In", kind="number"),
        Column("Cached", kind="number"),
        Column("Out", kind="number"),
        Column("Next change"),
    ),
    default_sort="name",
    search="Model",
)


def list_prices(ask: Ask) -> Reply:
    """The page."""
    table = table_state(TABLE, ask.incoming.path, ask.query)
    page = price_list.prices_page(ask.control, table.search, table.cut)
    return ask.page("prices.html", table=table, page=page)


def show(ask: Ask) -> Reply:
    """One model's prices."""
    return _page(ask, price_list.price_view(ask.control, ask.params["name"]))


def preview(ask: Ask) -> Reply:
    """What last month would have been; nothing is set."""
    view = price_list.price_view(ask.control, ask.params["name"])
    require(ask.control, "prices.write")
    form = _form(ask, view, given=True)
    if not _is_current(ask, view, form):
        return _page(ask, view, form, status=409)
    price, _ = _read(form, view, ask.now_at)
    if form.is_sound:
        try:
            return _page(ask, view, form, price_list.price_effect_of(ask.control, price))
        except RegistryError as error:
            form.trouble = str(error)
    return _page(ask, view, form, status=422)


def set_price(ask: Ask) -> Reply:
    """From its day on, or as soon as every gateway knows of it."""
    view = price_list.price_view(ask.control, ask.params["name"])
    require(ask.control, "prices.write")
    form = _form(ask, view, given=True)
    if not _is_current(ask, view, form):
        return _page(ask, view, form, status=409)
    price, valid_from = _read(form, view, ask.now_at)
    if form.is_sound:
        try:
            verbs.set_price(ask.control, price, valid_from, verbs.prices_mark(view.dated))
        except ChangedMeanwhile:
            return set_price(ask)  # it stops at `_is_current`
        except RegistryError as error:
            form.trouble = str(error)
        else:
            return ask.redirect(f"/prices/{path(view.model)}", "The price is set.")
    return _page(ask, view, form, status=422)


def _page(
    ask: Ask,
    view: PriceView,
    form: Form | None = None,
    effect: Effect | None = None,
    status: int = 200,
) -> Reply:
    return ask.page(
        "price.html",
        status,
        view=view,
        form=form or _form(ask, view),
        effect=effect,
        tokens=TOKENS,
        seconds=SECONDS,
        per_million=lambda nanos: text_of(nanos, MILLION),
        per_second=text_of,
    )


def _form(ask: Ask, view: PriceView, given: bool = False) -> Form:
    currency = ask.desk.settings.currency
    fields = [
        Field(name, label, "number", value=text_of(getattr(view.now, name), MILLION),
              unit=f"{currency} / 1M", required=True)
        for name, label in TOKENS.items()
    ]  # fmt: skip
    fields += [
        Field(name, label, "number", value=text_of(getattr(view.now, name)), unit=currency,
              required=True)
        for name, label in SECONDS.items()
    ]  # fmt: skip
    help_text = "From the beginning of that day (UTC); empty: as soon as every gateway knows of it."
    fields.append(Field("from", "Holds from", "date", help=help_text))
    mark = verbs.prices_mark(view.dated)
    fields.append(Field(DATED, "Prices seen", value=mark, max_length=16))
    return with_marks(Form(tuple(fields), ask.form if given else None))


def _is_current(ask: Ask, view: PriceView, form: Form) -> bool:
    """Whether the prices are those that were seen; else the form says so and knows those of now."""

    def by(names: Collection[str]) -> Mapping[str, str]:
        return who_set(ask.control, "price.set", view.model, names)

    mark = verbs.prices_mark(view.dated)
    seen = form.text(DATED)
    is_merged = merge(form, _form(ask, view), by)
    form.given = {**(form.given or {}), DATED: mark}
    if seen and seen != mark:
        form.trouble = (
            "The prices were changed meanwhile, as they stand below: nothing was done. Sent again, "
            "yours is set all the same."
        )
        form.given = {**form.given, SEEN: _form(ask, view).value(SEEN)}
    return is_merged and form.is_sound


def _read(form: Form, view: PriceView, now_at: float) -> tuple[PriceRecord, float | None]:
    valid_from = day_of(form, "from")
    if valid_from is not None and valid_from <= now_at:
        form.errors.setdefault("from", "A day to come: what was posted keeps its price.")
    amounts = {name: nanos_of(form, name, MILLION) or 0 for name in TOKENS}
    amounts |= {name: nanos_of(form, name) or 0 for name in SECONDS}
    return PriceRecord(view.model, valid_from or now_at, **amounts), valid_from


ROUTES = (
    PageRoute("GET", "/prices", list_prices),
    PageRoute("GET", "/prices/{name:path}", show),
    PageRoute("POST", "/price/preview/{name:path}", preview),
    PageRoute("POST", "/price/set/{name:path}", set_price),
)
