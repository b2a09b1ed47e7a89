"""Hosted models: the list (state, where each is, what is asked of it, size, price), and one model:
its revisions, a test prompt, and what may be done to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.responses import Response

from admin.live.load_plan import plan_load
from admin.live.rates import counts
from admin.live.residency import ON_DEVICE, load_times, models_in, place, places
from admin.operations import models as verbs
from admin.operations.models import ModelView
from admin.pages import playground
from admin.registration import registrar
from admin.rendering import charts
from admin.rendering.templating import path, span
from admin.web.forms import Form
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.tables import Column, Filter, TableSpec, TableState, table_state
from registry.errors import NotFound
from registry.lists.models import ModelCounts, ModelFilter, ModelLine
from registry.paging import Listed

ENDED = "polyhost_prepare_offences_total"
TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("State", "state"),
        Column("Requests, 24 h", "requests", "number", "down"),
        Column("Failed", "failed", "number", "down"),
        Column("Weights", "size", "number", "down"),
        Column("Load time", "load", "number", "down"),
        Column("Price per 1M input / output tokens", "price", "number", "down"),
    ),
    default_sort="-requests",
    filters=(
        Filter(
            "state",
            "State",
            {"ready": "Ready", "registering": "Registering", "failed": "Failed"},
        ),
        Filter("where", "Location", {"device": "On a device", "warm": "Warm", "cold": "Cold"}),
        Filter(
            "task",
            "Task",
            {"generate": "Generation", "embed": "Embedding", "classify": "Classification"},
        ),
        Filter("pinned", "Pinning", {"yes": "Pinned", "no": "Not pinned"}),
    ),
    search="Name or family",
)


def list_models(request: PageRequest) -> Response:
    """The page."""
    table = table_state(TABLE, request.path, request.query)
    page, counts = _models(request, table)
    names = [line.name for line in page.rows]
    on_device = models_in(request.live, ON_DEVICE)
    return request.page(
        "models.html",
        table=table,
        page=page,
        counts=counts,
        places=places(request.live, names),
        num_on_device=len(on_device),
        stream="/live/models?" + request.query_string,
    )


def live_models(request: PageRequest) -> Mapping[str, str]:
    """The state of each row that the page shows."""
    table = table_state(TABLE, "", request.query)
    page, _ = _models(request, table)
    now = places(request.live, [line.name for line in page.rows])
    return {
        f"state:{line.name}": request.fragment("models_parts.html", "state", line, now[line.name])
        for line in page.rows
    }


def _models(request: PageRequest, table: TableState) -> tuple[Listed[ModelLine], ModelCounts]:
    wanted, load_s = _wanted(request, table), load_times(request.live)
    return verbs.models_page(request.operator, wanted, table.sort, table.cut, load_s)


def _wanted(request: PageRequest, table: TableState) -> ModelFilter:
    where = table.chosen["where"]
    device, warm = models_in(request.live, ON_DEVICE), models_in(request.live, ["warm"])
    names = {"device": device, "warm": warm - device}.get(where)
    pinned = {"yes": True, "no": False}.get(table.chosen["pinned"])
    return ModelFilter(
        text=table.search,
        state="ready" if where and not table.chosen["state"] else table.chosen["state"],
        task=table.chosen["task"],
        pinned=pinned,
        names=names,
        not_names=device | warm if where == "cold" else None,
    )


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be done to a model. `warning`: what a page asks first; "": nothing."""

    label: str
    done: str
    run: Callable[[PageRequest, str], None]
    warning: Callable[[PageRequest, ModelView], str] | None = None
    danger: bool = False


def show_model(request: PageRequest) -> Response:
    """The page."""
    return model_page(request, _view(request))


def model_page(
    request: PageRequest,
    view: ModelView,
    form: Form | None = None,
    answer: playground.SmokeAnswer | None = None,
    status: int = 200,
) -> Response:
    """The page, with a test prompt's form and what came of it."""
    name = view.model.name
    hours = verbs.model_traffic(request.operator, name)
    show = charts.shown(request.query.get("show", ""))
    return request.page(
        "model.html",
        status,
        view=view,
        model=view.model,
        place=place(request.live, name, view.sharing),
        num_ended=_num_ended(request, name),
        hours=list(reversed(hours)),
        pictures=charts.PICTURES,
        show=show,
        chart=charts.hours_chart(hours, name, show),
        has_worker=bool(request.live.workers),
        form=form or playground.form_for(request, view.model),
        answer=answer,
    )


def _num_ended(request: PageRequest, name: str) -> int:
    """Requests that made its chat template or tokenizer take too much, here, since the start."""
    return counts(request.context.edge, {ENDED: "model_name"})[ENDED].get(name, 0)


def smoke_prompt(request: PageRequest) -> Response:
    """One request, and what came of it, on the same page."""
    view = _view(request)
    form = playground.form_for(request, view.model, given=True)
    answer = playground.ask_model(request, view.model, form)
    return model_page(request, view, form, answer, 200 if answer else 422)


def live_model(request: PageRequest) -> Mapping[str, str]:
    """State, figures, and a registration's progress; a page whose shape changes loads anew."""
    view = _view(request)
    now = place(request.live, view.model.name, view.sharing)
    shape = f"{view.model.state} {view.job.state if view.job else ''} {view.model.revision}"
    parts = {
        "state": request.fragment("model_parts.html", "state", view.model, now),
        "figures": request.fragment(
            "model_parts.html",
            "figures",
            view,
            now,
            request.now_at,
            _num_ended(request, view.model.name),
        ),
    }
    if view.job is not None:
        parts["job"] = request.fragment("model_parts.html", "job_row", view.job)
    if request.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def confirm(request: PageRequest) -> Response:
    """What will happen, and a button."""
    action = _action(request)
    view = _view(request)
    if request.path_params["action"] == "load":
        plan = plan_load(request.operator, view.model.name, request.live.workers)
        return request.page("load.html", plan=plan)
    warning = action.warning(request, view) if action.warning else ""
    return request.page(
        "confirm.html",
        title=f"{action.label} {view.model.name}?",
        text=warning,
        button=action.label,
        danger=action.danger,
        action=f"/model/do/{request.path_params['action']}/{path(view.model.name)}",
        fields={"to": request.query.get("to", "")},
        back=f"/models/{path(view.model.name)}",
    )


def act(request: PageRequest) -> Response:
    """Do it."""
    action, name = _action(request), request.path_params["name"]
    action.run(request, name)
    gone = request.path_params["action"] == "remove"
    where = "/models" if gone else f"/models/{path(name)}"
    if request.fields.get("back") == "registrations":
        where = "/registrations"
    return request.redirect(where, action.done.format(name=name))


def _action(request: PageRequest) -> Action:
    action = ACTIONS.get(request.path_params["action"])
    if action is None:
        raise NotFound("unknown model action")
    return action


def _running(request: PageRequest, view: ModelView) -> str:
    now = place(request.live, view.model.name)
    if not now.num_running:
        return "The model has no running requests."
    what = "request" if now.num_running == 1 else "requests"
    return f"{now.num_running} running {what} will finish first."


def _warn_unload(request: PageRequest, view: ModelView) -> str:
    again = place(request.live, view.model.name).load_s
    takes = f", which takes about {span(again)}" if again is not None else ""
    then = f"The next request loads it again{takes}."
    return f"{_running(request, view)} Its memory is freed. {then}"


def _warn_remove(request: PageRequest, view: ModelView) -> str:
    kept = "Its usage stays in the ledger and on invoices. The name can be registered again."
    return f"{_running(request, view)} New requests for it are rejected at once. {kept}"


def _warn_roll_back(request: PageRequest, view: ModelView) -> str:
    to = request.query.get("to", "")[:12]
    return (
        f"Revision {to} is served again, without a download. {_running(request, view)} "
        "New requests use that revision within a second."
    )


def _warn_cancel(request: PageRequest, view: ModelView) -> str:
    del request, view
    return "Everything downloaded and converted so far is deleted."


def _retry(request: PageRequest, name: str) -> None:
    registrar.run_detached(request.operator, verbs.retry_registration(request.operator, name))


def _cancel(request: PageRequest, name: str) -> None:
    verbs.cancel_registration(request.operator, name)


def _remove(request: PageRequest, name: str) -> None:
    verbs.remove_model(request.operator, name)


def _roll_back(request: PageRequest, name: str) -> None:
    verbs.roll_back(request.operator, name, request.fields.get("to", ""))


ACTIONS: Mapping[str, Action] = {
    "load": Action(
        "Load",
        "The server was asked to load {name}.",
        lambda request, name: verbs.request_residency(request.operator, name, "load"),
    ),
    "unload": Action(
        "Unload",
        "The server was asked to unload {name}.",
        lambda request, name: verbs.request_residency(request.operator, name, "unload"),
        _warn_unload,
    ),
    "pin": Action(
        "Pin",
        "{name} was pinned and is never evicted.",
        lambda request, name: _set_pinned(request, name, True),
    ),
    "unpin": Action(
        "Unpin",
        "{name} was unpinned.",
        lambda request, name: _set_pinned(request, name, False),
    ),
    "remove": Action("Remove", "{name} was removed.", _remove, _warn_remove, danger=True),
    "rollback": Action(
        "Roll back", "{name} was rolled back to that revision.", _roll_back, _warn_roll_back
    ),
    "cancel": Action(
        "Cancel registration",
        "The registration of {name} was cancelled.",
        _cancel,
        _warn_cancel,
        danger=True,
    ),
    "retry": Action("Retry", "{name} is being registered again.", _retry),
}


def _set_pinned(request: PageRequest, name: str, pinned: bool) -> None:
    verbs.set_pinned(request.operator, name, pinned)


def _view(request: PageRequest) -> ModelView:
    """The model that the path names. Raises NotFound."""
    return verbs.model_view(request.operator, request.path_params["name"])


ROUTES = (
    PageRoute("GET", "/models", list_models),
    PageRoute("GET", "/models/{name:path}", show_model),
    PageRoute("GET", "/model/confirm/{action}/{name:path}", confirm),
    PageRoute("POST", "/model/do/{action}/{name:path}", act),
    PageRoute("POST", "/model/smoke/{name:path}", smoke_prompt, pool="checks"),
)
STREAMS = (
    StreamRoute("/live/models", live_models, every_s=2.0),
    StreamRoute("/live/model/{name:path}", live_model, every_s=0.7),
)
