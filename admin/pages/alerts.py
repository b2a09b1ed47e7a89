"""Alerts on spending: the rules, a new one, a test message, and what was delivered."""

from collections.abc import Callable, Mapping

import msgspec
from starlette.responses import Response

from admin.context.operator_context import require
from admin.operations import limits as verbs
from admin.operations.limits import NamedRule
from admin.rendering.templating import path
from admin.web.forms import Field, Form, nanos_of
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.errors import InvalidValue, NotFound
from registry.money.alerts import MAX_PERCENT, MAX_PERCENTS, MAX_URL, Alert

NUM_LOGGED = 100
LOG_ROWS = 10
DEFAULT_PERCENTS = "50, 80, 100"
SCOPES = {"tenant": "A tenant", "key": "A key", "model": "A model", "gateway": "All requests"}
WINDOWS = {"month": "Calendar month", "day": "Calendar day"}
AT = {"key": "/keys/", "tenant": "/tenants/", "model": "/models/"}


class AlertBody(msgspec.Struct, frozen=True):
    """Of the message that was sent, what the log shows."""

    name: str = ""
    window: str = ""
    spent_nanos: int = 0
    budget_nanos: int = 0


LOG = TableSpec(
    columns=(
        Column("Raised", "raised", first="down"),
        Column("Spending of", "name"),
        Column("Threshold", "percent", "number", "down"),
        Column("Spent", "spent", "number", "down"),
        Column("Attempts", "tries", "number", "down"),
        Column("State", "state"),
    ),
    default_sort="-raised",
)
LOG_VALUES: Mapping[str, Callable[[tuple[Alert, AlertBody]], str | float]] = {
    "raised": lambda row: row[0].raised_at,
    "name": lambda row: row[1].name,
    "percent": lambda row: row[0].percent,
    "spent": lambda row: row[1].spent_nanos,
    "tries": lambda row: row[0].num_tries,
    "state": lambda row: 2 if row[0].delivered_at is not None else int(not row[0].next_try_at),
}


def list_alerts(request: PageRequest) -> Response:
    """The page; `scope` and `owner` in the address fill the form."""
    return _page(request, _form(request, given=False))


def add(request: PageRequest) -> Response:
    """A new rule. Its secret is on this answer and nowhere else: no redirect."""
    require(request.operator, "limits.write")
    form = _form(request, given=True)
    scope, owner, kind = form.text("scope"), form.text("owner"), form.text("kind")
    url, budget, percents = form.text("url"), nanos_of(form, "sum"), _percents(form)
    if scope != "gateway" and not owner:
        form.errors.setdefault("owner", "Enter whose spending is watched.")
    if form.is_sound:
        with form.refusals(owner=NotFound, url=InvalidValue):
            rule, secret = verbs.add_alert(
                request.operator,
                scope,  # type: ignore[arg-type]  # one of SCOPES
                "" if scope == "gateway" else owner,
                kind,  # type: ignore[arg-type]  # one of WINDOWS
                budget or 0,
                percents,
                url,
            )
            return request.page("alert_made.html", rule=rule, secret=secret)
    return _page(request, form, 422)


def send_test(request: PageRequest) -> Response:
    """Send a message now; the page says whether it was taken."""
    verbs.send_test(request.operator, request.path_params["id"])
    return request.redirect("/alerts", "The receiver accepted the test message.")


def confirm_removal(request: PageRequest) -> Response:
    """What will happen, and a button."""
    require(request.operator, "limits.write")
    rule = _rule(request)
    return request.page(
        "confirm.html",
        title=f"Remove the alert on {rule.name or rule.rule.owner or 'all requests'}?",
        text="No more messages are sent for it, and its log is deleted.",
        button="Remove",
        danger=True,
        action=f"/alert/remove/{path(rule.rule.id)}",
        fields={},
        back="/alerts",
    )


def remove(request: PageRequest) -> Response:
    """The rule and its log."""
    verbs.remove_alert(request.operator, request.path_params["id"])
    return request.redirect("/alerts", "The alert was removed.")


def _rule(request: PageRequest) -> NamedRule:
    wanted = request.path_params["id"]
    for rule in verbs.list_alerts(request.operator):
        if rule.rule.id == wanted:
            return rule
    raise NotFound("this alert does not exist any more")


def _page(request: PageRequest, form: Form, status: int = 200) -> Response:
    rules = verbs.list_alerts(request.operator)
    log = [(alert, _body(alert)) for alert in verbs.alert_log(request.operator, NUM_LOGGED)]
    table = table_state(LOG, f"{PREFIX}/alerts", request.query, LOG_ROWS)
    return request.page(
        "alerts.html",
        status,
        rules=rules,
        table=table,
        log=table.cut_rows(log, LOG_VALUES, lambda row: row[0].id),
        is_cut=len(log) == NUM_LOGGED,
        num_logged=NUM_LOGGED,
        form=form,
        at=AT,
    )


def _body(alert: Alert) -> AlertBody:
    return msgspec.json.decode(alert.body, type=AlertBody)


def _percents(form: Form) -> list[int]:
    words = form.text("percents").replace(",", " ").replace("%", " ").split()
    found = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 6]
    wrong = len(found) < len(words) or not 1 <= len(found) <= MAX_PERCENTS
    if wrong or not all(1 <= percent <= MAX_PERCENT for percent in found):
        said = f"Enter 1 to {MAX_PERCENTS} whole percentages from 1 to {MAX_PERCENT}."
        form.errors.setdefault("percents", said)
    return found


def _form(request: PageRequest, given: bool) -> Form:
    query, currency = request.query, request.context.settings.currency
    scope = query.get("scope", "tenant")
    fields = (
        Field("scope", "Spending of", "select", choices=SCOPES,
              value=scope if scope in SCOPES else "tenant"),
        Field("owner", "Name or id", value=query.get("owner", ""), max_length=128,
              help="Of the tenant, key or model. Leave empty for all requests."),
        Field("kind", "Period", "select", value="month", choices=WINDOWS, help="In UTC."),
        Field("sum", "Soft budget", "number", unit=currency,
              help="Requests are not refused. Leave empty to use the budget that is in force."),
        Field("percents", "Thresholds", required=True, value=DEFAULT_PERCENTS, unit="%",
              help="Each sends one message per period."),
        Field("url", "Webhook", required=True, max_length=MAX_URL,
              placeholder="https://example.com/hook", help="Receives a signed POST request."),
    )  # fmt: skip
    return Form(fields, request.fields if given else None)


ROUTES = (
    PageRoute("GET", "/alerts", list_alerts),
    PageRoute("POST", "/alert/add", add),
    PageRoute("POST", "/alert/test/{id}", send_test, pool="checks"),
    PageRoute("GET", "/alert/remove/{id}", confirm_removal),
    PageRoute("POST", "/alert/remove/{id}", remove),
)
