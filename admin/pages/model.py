"""One model: where it is, what is asked of it, its revisions, and what may be done to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from admin import model_charts
from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.forms import Form
from admin.pages import smoke
from admin.residency import place
from admin.templating import path, span
from gateway.registration import registrar, registration
from gateway.service import model_list as views
from gateway.service import models as verbs
from gateway.service.model_list import ModelView
from registry.errors import NotFound


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can be done to a model. `warning`: what a page asks first; "": nothing."""

    label: str
    done: str
    run: Callable[[Ask, str], None]
    warning: Callable[[Ask, ModelView], str] | None = None
    danger: bool = False


def show_model(ask: Ask) -> Reply:
    """The page."""
    return model_page(ask, views.model_view(ask.control, ask.params["name"]))


def model_page(
    ask: Ask,
    view: ModelView,
    form: Form | None = None,
    answer: smoke.SmokeAnswer | None = None,
    status: int = 200,
) -> Reply:
    """The page, with a test prompt's form and what came of it."""
    name = view.model.name
    hours = views.model_traffic(ask.control, name)
    show = model_charts.shown(ask.query.get("show", ""))
    return ask.page(
        "model.html",
        status,
        view=view,
        model=view.model,
        place=place(ask.live, name),
        hours=list(reversed(hours)),
        pictures=model_charts.PICTURES,
        show=show,
        chart=model_charts.picture(hours, name, show),
        has_worker=bool(ask.live.workers),
        form=form or smoke.form_for(ask, view.model),
        answer=answer,
    )


def smoke_prompt(ask: Ask) -> Reply:
    """One request, and what came of it, on the same page."""
    view = views.model_view(ask.control, ask.params["name"])
    form = smoke.form_for(ask, view.model, given=True)
    answer = smoke.ask_model(ask, view.model, form)
    return model_page(ask, view, form, answer, 200 if answer else 422)


def live_model(ask: Ask) -> Mapping[str, str]:
    """State, figures, and a registration's progress; a page whose shape changes loads anew."""
    view = views.model_view(ask.control, ask.params["name"])
    now = place(ask.live, view.model.name)
    shape = f"{view.model.state} {view.job.state if view.job else ''} {view.model.revision}"
    parts = {
        "state": ask.fragment("model_parts.html", "state", view.model, now),
        "figures": ask.fragment("model_parts.html", "figures", view, now, ask.now_at),
    }
    if view.job is not None:
        parts["job"] = ask.fragment("model_parts.html", "job_row", view.job)
    if ask.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def confirm(ask: Ask) -> Reply:
    """What will happen, and a button."""
    action = _action(ask)
    view = views.model_view(ask.control, ask.params["name"])
    warning = action.warning(ask, view) if action.warning else ""
    return ask.page(
        "confirm.html",
        title=f"{action.label} {view.model.name}?",
        text=warning,
        button=action.label,
        danger=action.danger,
        action=f"/model/do/{ask.params['action']}/{path(view.model.name)}",
        fields={"to": ask.query.get("to", "")},
        back=f"/models/{path(view.model.name)}",
    )


def act(ask: Ask) -> Reply:
    """Do it."""
    action, name = _action(ask), ask.params["name"]
    action.run(ask, name)
    gone = ask.params["action"] == "remove"
    where = "/models" if gone else f"/models/{path(name)}"
    if ask.form.get("back") == "registrations":
        where = "/registrations"
    return ask.redirect(where, action.done.format(name=name))


def _action(ask: Ask) -> Action:
    action = ACTIONS.get(ask.params["action"])
    if action is None:
        raise NotFound("nothing of that kind can be done to a model")
    return action


def _running(ask: Ask, view: ModelView) -> str:
    now = place(ask.live, view.model.name)
    if not now.num_running:
        return "Nothing runs on it now."
    what = "request" if now.num_running == 1 else "requests"
    return f"{now.num_running} running {what} will finish first."


def _warn_unload(ask: Ask, view: ModelView) -> str:
    again = place(ask.live, view.model.name).load_s
    takes = f", which takes about {span(again)}" if again is not None else ""
    then = f"It is loaded again when somebody asks for it{takes}."
    return f"{_running(ask, view)} Its memory becomes free. {then}"


def _warn_remove(ask: Ask, view: ModelView) -> str:
    kept = "What was posted for it stays in usage and bills. Its name can be registered again."
    return f"{_running(ask, view)} New requests for it are refused from now on. {kept}"


def _warn_roll_back(ask: Ask, view: ModelView) -> str:
    to = ask.query.get("to", "")[:12]
    return (
        f"Revision {to} is served again, without a download. {_running(ask, view)} "
        "New requests go to the other revision within a second."
    )


def _warn_cancel(ask: Ask, view: ModelView) -> str:
    del ask, view
    return "What was fetched and converted so far is deleted."


def _retry(ask: Ask, name: str) -> None:
    registrar.run_detached(ask.control, registration.begin_retry(ask.control, name))


def _cancel(ask: Ask, name: str) -> None:
    registration.cancel(ask.control, name)


def _remove(ask: Ask, name: str) -> None:
    verbs.remove_model(ask.control, name)


def _roll_back(ask: Ask, name: str) -> None:
    verbs.roll_back(ask.control, name, ask.form.get("to", ""))


ACTIONS: Mapping[str, Action] = {
    "load": Action(
        "Load",
        "The server was asked to load {name}.",
        lambda ask, name: verbs.request_residency(ask.control, name, "load"),
    ),
    "unload": Action(
        "Unload",
        "The server was asked to unload {name}.",
        lambda ask, name: verbs.request_residency(ask.control, name, "unload"),
        _warn_unload,
    ),
    "pin": Action(
        "Pin",
        "{name} is pinned: it is never evicted.",
        lambda ask, name: _set_pinned(ask, name, True),
    ),
    "unpin": Action(
        "Unpin",
        "{name} is not pinned any more.",
        lambda ask, name: _set_pinned(ask, name, False),
    ),
    "remove": Action("Remove", "{name} is removed.", _remove, _warn_remove, danger=True),
    "rollback": Action(
        "Roll back", "{name} is back at that revision.", _roll_back, _warn_roll_back
    ),
    "cancel": Action(
        "Cancel registration",
        "The registration of {name} is cancelled.",
        _cancel,
        _warn_cancel,
        danger=True,
    ),
    "retry": Action("Retry", "{name} is being registered again.", _retry),
}


def _set_pinned(ask: Ask, name: str, pinned: bool) -> None:
    verbs.set_pinned(ask.control, name, pinned)


ROUTES = (
    PageRoute("GET", "/models/{name:path}", show_model, live=True),
    PageRoute("GET", "/model/confirm/{action}/{name:path}", confirm, live=True),
    PageRoute("POST", "/model/do/{action}/{name:path}", act),
    PageRoute("POST", "/model/smoke/{name:path}", smoke_prompt, live=True, pool="checks"),
)
STREAMS = (StreamRoute("/live/model/{name:path}", live_model, every_s=0.7),)
