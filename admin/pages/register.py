"""Registering a model: what and how, a look at what it takes, then the work with its progress.

    GET  /register                the form; ?update=NAME: a new revision of a model
    POST /register/check          what it is, what it takes, whether it fits, what would leave
    POST /register                begins the work, in a process of its own; its progress is on the
                                  model's page

Nothing is kept between the steps: what was typed travels in the form, and a registration that has
begun is a row of the catalog.
"""

from collections.abc import Collection, Sequence

from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.live_state import LiveState
from admin.templating import path
from engine.protocol import WorkerStatus
from gateway.policy.fleet_view import ModelView, WorkerView
from gateway.policy.make_room import Outlook, outlook
from gateway.registration import preflight, registrar, registration
from gateway.registration.preflight import Preflight
from gateway.service import model_list
from gateway.service.control import require
from registry.errors import AlreadyExists, InvalidValue, RegistryError

DTYPES = {
    "auto": "As in the checkpoint",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "int8": "int8: half the memory of bfloat16",
    "int4": "int4: a third of the memory of bfloat16, with some loss",
}


def show(ask: Ask) -> Reply:
    """The form, empty or for a new revision."""
    require(ask.control, "models.write")
    return _page(ask, _form(ask, given=False))


def check(ask: Ask) -> Reply:
    """Look before anything is done."""
    form = _form(ask)
    form.text("name")
    source = form.text("source")
    dtype, revision = form.text("dtype"), form.text("revision")
    if not form.is_sound:
        return _page(ask, form, status=422)
    try:
        dispatcher = ask.desk.edge.services.dispatcher
        found = preflight.look(ask.control, source, dtype, revision, lambda: dispatcher.stopping)
    except InvalidValue as error:
        form.errors["source"] = str(error)
        return _page(ask, form, status=422)
    room: Outlook | None = None
    if found.found is not None and not found.code:
        room = _outlook(ask, ask.live, found.found.weight_bytes)
    return _page(ask, form, found, room)


def begin(ask: Ask) -> Reply:
    """Begin, and go to where its progress is."""
    require(ask.control, "models.write")
    form = _form(ask)
    name, source = form.text("name"), form.text("source")
    dtype, revision = form.text("dtype"), form.text("revision")
    if not form.is_sound:
        return _page(ask, form, status=422)
    control = ask.control
    try:
        if ask.form.get("update"):
            model = registration.begin_update(control, name, source, dtype, revision)
        else:
            pinned = form.is_on("pin")
            model = registration.begin(control, name, source, dtype, pinned, revision)
    except AlreadyExists as error:
        form.errors["name"] = str(error)
    except RegistryError as error:
        form.trouble = str(error)
    if not form.is_sound:
        return _page(ask, form, status=409)
    registrar.run_detached(control, model)
    return ask.redirect(f"/models/{path(name)}", f"{name} is being registered.")


def _form(ask: Ask, given: bool = True) -> Form:
    name = ask.form.get("update") if given else ask.query.get("update", "")
    source = revision = ""
    dtype = "auto"
    if name:
        model = model_list.model_view(ask.control, name).model
        source, revision = model.source, model.requested_revision
        dtype = model.requested_dtype
    fields = (
        Field(
            "name",
            "Name",
            help="What requests name as their model. Letters, digits and . _ : / -",
            value=name or "",
            required=True,
            max_length=128,
        ),
        Field(
            "source",
            "Source",
            help="A folder on this server with config.json, safetensors and a tokenizer, "
            "or a hub id such as org/name.",
            value=source,
            required=True,
            placeholder="org/name or /path/to/folder",
            max_length=1024,
        ),
        Field(
            "revision",
            "Hub revision",
            help="Branch, tag or commit; empty: main.",
            value=revision,
            max_length=128,
        ),
        Field("dtype", "Type of the weights", "select", value=dtype, choices=DTYPES),
        Field("pin", "Pin it", "checkbox", help="Once loaded it is never evicted."),
    )
    return Form(fields, ask.form if given else None)


def _page(
    ask: Ask,
    form: Form,
    found: Preflight | None = None,
    room: Outlook | None = None,
    status: int = 200,
) -> Reply:
    update = ask.form.get("update") or ask.query.get("update", "")
    return ask.page(
        "register.html", status, form=form, found=found, room=room, update=update, dtypes=DTYPES
    )


def _outlook(ask: Ask, live: LiveState, num_bytes: int) -> Outlook | None:
    """On the worker where the least has to leave; None where no worker is connected."""
    names = {row.model_id for worker in live.workers for row in worker.models}
    views = _views(live, model_list.pinned(ask.control, names))
    rates = model_list.ask_rates(ask.control, names)
    looks = [outlook(view, num_bytes, rates) for view in views]
    order = ("free", "evicts", "never")
    return min(looks, key=lambda look: (order.index(look.fit), len(look.leavers)), default=None)


def _views(live: LiveState, pinned: Collection[str]) -> Sequence[WorkerView]:
    """KV that is only kept for reuse makes room without anybody's leaving."""
    return [
        WorkerView(
            worker_id=worker.worker_id,
            free_bytes=_free_pages(worker) * worker.page_bytes,
            arena_bytes=worker.num_pages * worker.page_bytes,
            models={
                row.model_id: ModelView(
                    state=row.state,
                    weight_bytes=row.weight_bytes,
                    load_s=row.load_s_estimate,
                    idle=not (row.num_running or row.num_waiting),
                    pinned=row.model_id in pinned,
                )
                for row in worker.models
            },
        )
        for worker in live.workers
    ]


def _free_pages(worker: WorkerStatus) -> int:
    kept = sum(n for owner, n in worker.pages.items() if owner.endswith("/kv_cached"))
    return worker.pages.get("free", 0) + kept


ROUTES = (
    PageRoute("GET", "/register", show),
    PageRoute("POST", "/register/check", check, live=True, pool="checks"),
    PageRoute("POST", "/register", begin, pool="checks"),
)
