"""Registrations: all of them, with speed and time left of those that go on; and a new one: what and
how, a look at what it takes, then the work with its progress.

    GET  /register                the form; ?update=NAME: a new revision of a model
    POST /register/check          what it is, what it takes, whether it fits, what would leave
    POST /register                begins the work, in a process of its own; its progress is on the
                                  model's page

Nothing is kept between the steps: what was typed travels in the form, and a registration that has
begun is a row of the catalog.
"""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from admin.context.operator_context import require
from admin.context.registration_files import PHASES
from admin.live.load_plan import best_outlook
from admin.operations import models
from admin.operations import models as verbs
from admin.registration import preflight, registrar
from admin.registration.preflight import Preflight
from admin.registration.register_process import HostingOption
from admin.rendering.templating import path
from admin.web.errors import refused
from admin.web.forms import Field, Form
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.streams import StreamedResponse
from admin.web.tables import Column, Filter, TableSpec, TableState, table_state
from gateway.dispatch.policy.fleet_view import MemoryOutlook
from registry.errors import AlreadyExists, InvalidValue, RegistryError
from registry.models.registrations import Registration, RegistrationFilter
from registry.paging import Listed

TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("Source"),
        Column("State"),
        Column("Changed", "since", first="down"),
        Column("Actions", kind="action"),
    ),
    default_sort="-since",
    filters=(
        Filter(
            "state", "State", {"registering": "In progress", "failed": "Failed", "ready": "Done"}
        ),
    ),
    search="Name or source",
)
DTYPES = {
    "auto": "Same as the checkpoint",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "int8": "int8: half the memory of bfloat16",
    "fp8": "fp8: half the memory of bfloat16, and fast on GPUs with fp8 (Ada, Hopper, later) only",
    "int4": "int4: a third of the memory of bfloat16, with some loss",
}
ACCESS = {
    "": "open",
    "auto": "gated: accept its licence on the hub",
    "manual": "gated: its authors decide on access",
}


@dataclass(frozen=True, slots=True)
class DtypeRow:
    """A dtype that the checked model can be hosted in. `value`: of the form's field."""

    value: str
    option: HostingOption
    fits: bool | None
    chosen: bool


def show_all(request: PageRequest) -> Response:
    """The page. Those that go on are above, whatever the list below is asked."""
    table = table_state(TABLE, request.path, request.query)
    found, running, counts = _found(request, table)
    return request.page(
        "registrations.html",
        table=table,
        page=found,
        running=running,
        counts=counts,
        shape=_shape(found, running),
        stream="/live/registrations?" + request.query_string,
    )


def live(request: PageRequest) -> Mapping[str, str]:
    """How far each is; where another button would be right the page loads anew."""
    table = table_state(TABLE, "", request.query)
    found, running, _ = _found(request, table)
    parts = {
        f"job:{each.name}": request.fragment(
            "registrations_parts.html", "work", each, request.now_at
        )
        for each in running.rows
    }
    shape = _shape(found, running)
    if request.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def _found(
    request: PageRequest, table: TableState
) -> tuple[Listed[Registration], Listed[Registration], Mapping[str, int]]:
    wanted = RegistrationFilter(table.search, table.chosen["state"])
    return verbs.registrations_page(request.operator, wanted, table.sort, table.cut)


def _shape(*lists: Listed[Registration]) -> str:
    """What the page's rows and buttons depend on."""
    states = " ".join(f"{each.name}:{each.state}" for found in lists for each in found.rows)
    return hashlib.sha256(states.encode()).hexdigest()[:16]


def show(request: PageRequest) -> Response:
    """The form, empty or for a new revision."""
    require(request.operator, "models.write")
    return _page(request, _form(request, given=False))


def check(request: PageRequest) -> Response:
    """Look before anything is done. The page's script asks for a stream that says how far it is,
    and that is given up with the page."""
    require(request.operator, "models.write")
    if "text/event-stream" in request.headers.get("accept", ""):
        return StreamedResponse(_checking(request), "text/event-stream")
    return _checked(request, lambda: False, lambda phase: None)


async def _checking(request: PageRequest) -> AsyncIterator[bytes]:
    """`phase` events, in words, then `page`: the whole page as without scripts."""
    told: asyncio.Queue[tuple[str, str] | None] = asyncio.Queue()
    gone = threading.Event()

    def tell(item: tuple[str, str] | None) -> None:
        request.loop.call_soon_threadsafe(told.put_nowait, item)

    def work() -> None:
        try:
            with request.context.checks:
                try:
                    page = _checked(request, gone.is_set, lambda phase: tell(("phase", phase)))
                except RegistryError as error:
                    page = refused(request, error)
            tell(("page", bytes(page.body).decode()))
        finally:
            tell(None)

    threading.Thread(target=work, name="admin-check", daemon=True).start()
    try:
        while item := await told.get():
            name, text = item
            data = msgspec.json.encode(PHASES.get(text, text) if name == "phase" else text)
            yield b"event: %s\ndata: %s\n\n" % (name.encode(), data)
    finally:
        gone.set()


def _checked(
    request: PageRequest, is_gone: Callable[[], bool], report: Callable[[str], None]
) -> Response:
    """The page with what was found. What is cheap to see is said before anything is asked."""
    form = _form(request)
    name, source = form.text("name"), form.text("source")
    dtype, revision = form.text("dtype"), form.text("revision")
    if name and not request.fields.get("update"):
        _check_name(request, form, name)
    if not form.is_sound:
        return _page(request, form, status=422)
    dispatcher = request.context.edge.services.dispatcher
    try:
        found = preflight.look(
            *(request.operator, source, dtype, revision),
            lambda: dispatcher.stopping or is_gone(),
            report=report,
        )
    except InvalidValue as error:
        form.errors["source"] = str(error)
        return _page(request, form, status=422)
    room: MemoryOutlook | None = None
    if found.found is not None and not found.code:
        room = best_outlook(request.operator, request.live.workers, found.found.weight_bytes)
    return _page(request, form, found, room)


def begin(request: PageRequest) -> Response:
    """Begin, and go to where its progress is."""
    require(request.operator, "models.write")
    form = _form(request)
    name, source = form.text("name"), form.text("source")
    dtype, revision = form.text("dtype"), form.text("revision")
    if not form.is_sound:
        return _page(request, form, status=422)
    operator = request.operator
    if not request.fields.get("update"):
        _check_name(request, form, name)
    if not form.is_sound:
        return _page(request, form, status=409)
    with form.refusals(name=AlreadyExists, source=InvalidValue):
        if request.fields.get("update"):
            model = models.begin_update(operator, name, source, dtype, revision)
        else:
            pinned = form.is_on("pin")
            model = models.begin_registration(operator, name, source, dtype, pinned, revision)
        registrar.run_detached(operator, model)
        return request.redirect(f"/models/{path(name)}", f"{name} is being registered.")
    return _page(request, form, status=409)


def _check_name(request: PageRequest, form: Form, name: str) -> None:
    """Taken, or none that a model can have: said beside the field."""
    with form.refusals(name=RegistryError):
        models.check_name(request.operator, name)


def _form(request: PageRequest, given: bool = True) -> Form:
    name = request.fields.get("update") if given else request.query.get("update", "")
    source = revision = ""
    dtype = "auto"
    if name:
        model = models.model_view(request.operator, name).model
        source, revision = model.source, model.requested_revision
        dtype = model.requested_dtype
    fields = (
        Field(
            "name",
            "Name",
            help="The model name in requests. Letters, digits and . _ : / -",
            value=name or "",
            required=True,
            max_length=128,
        ),
        Field(
            "source",
            "Source",
            help="A folder on this server with config.json, safetensors and a tokenizer, or with "
            "one GGUF file; or a hub id such as org/name.",
            value=source,
            required=True,
            placeholder="org/name or /path/to/folder",
            max_length=1024,
        ),
        Field(
            "revision",
            "Hub revision",
            help="Branch, tag or commit. Leave empty for main.",
            value=revision,
            max_length=128,
        ),
        Field("dtype", "Weight data type", "select", value=dtype, choices=DTYPES),
        Field("pin", "Pin the model", "checkbox", help="A pinned model is never evicted."),
    )
    return Form(fields, request.fields if given else None)


def _page(
    request: PageRequest,
    form: Form,
    found: Preflight | None = None,
    room: MemoryOutlook | None = None,
    status: int = 200,
) -> Response:
    update = request.fields.get("update") or request.query.get("update", "")
    rows = _dtype_rows(form.value("dtype"), found, room) if found else []
    shown = {"found": found, "room": room, "rows": rows, "update": update, "access": ACCESS}
    return request.page("register.html", status, form=form, **shown)


def _dtype_rows(asked: str, seen: Preflight, room: MemoryOutlook | None) -> list[DtypeRow]:
    """What could be chosen, with what was asked for chosen; where that is too large, the first
    that fits. Empty where the choice is not among them: then the form's own list stays."""
    if seen.found is None or seen.ready:
        return []
    taken = seen.found.dtype
    options = seen.found.choices
    if taken not in {each.dtype for each in options}:
        return []
    fits = {each.dtype: _fits(each, room) for each in options}
    first = next((each.dtype for each in options if fits[each.dtype] is not False), taken)
    chosen = first if seen.code == "too_large" else taken
    return [
        DtypeRow(
            "auto" if asked == "auto" and each.dtype == taken else each.dtype,
            *(each, fits[each.dtype], each.dtype == chosen),
        )
        for each in options
    ]


def _fits(option: HostingOption, room: MemoryOutlook | None) -> bool | None:
    """Beside nothing else on the device."""
    if room is None:
        return option.fits
    return option.weight_bytes + option.kv_bytes <= room.arena_bytes


ROUTES = (
    PageRoute("GET", "/registrations", show_all),
    PageRoute("GET", "/register", show),
    PageRoute("POST", "/register/check", check, pool="checks"),
    PageRoute("POST", "/register", begin, pool="checks"),
)
STREAMS = (StreamRoute("/live/registrations", live),)
