"""Operations on hosted models: the catalog, revisions, residency, registrations.

A registration begins here as a row in the catalog that is `registering` for this process, which
then calls `run` or `run_detached` of admin/registration/registrar.py. `cancel_registration` ends
such a row, and the process that works for it notices. Here too: deleting packs that nobody uses.
"""

import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from admin.context.operation import operation
from admin.context.operator_context import (
    OperatorContext,
    open_context,
    process_is_alive,
    server_is_running,
)
from admin.context.registration_files import DOWNLOADS_FOLDER, download_name, is_hub, is_old, sweep
from gateway.settings.settings import PACKS_FOLDER, Settings
from registry import locks
from registry.errors import IllegalTransition, InvalidValue, RegistryError
from registry.lists import models as model_list
from registry.lists import search as finding
from registry.lists.models import Hour, ModelCounts, ModelFilter, ModelLine
from registry.models import catalog, registrations, residency_requests, revisions
from registry.models.catalog import CANCELLED, HEARTBEAT_TIMEOUT_S, NEXT, ModelRecord
from registry.models.registrations import Registration, RegistrationFilter
from registry.models.residency_requests import ResidencyAction
from registry.models.revisions import RevisionRecord
from registry.money import prices
from registry.money.prices import PriceRecord
from registry.paging import Cut, Listed
from registry.session import reading

CLEANUP_TIMEOUT_S = 3.0
RECENT_S = 86_400.0
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "int4")
_HUB_ID = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
_REVISION = re.compile(r"[!-~]{1,128}")
MAX_MODELS = 200


@operation("models.read", audit=("model.failed",))
def list_models(context: OperatorContext, *, with_removed: bool = False) -> list[ModelRecord]:
    """The catalog; registrations whose process died are failed on the way, and cleaned up after."""
    now_at = context.clock()
    with context.reading() as session:
        models = catalog.list_models(session, with_removed=with_removed)
    if any(model.state == "registering" for model in models):
        with context.writing() as session:
            catalog.fail_interrupted(session, process_is_alive, now_at=now_at)
            models = catalog.list_models(session, with_removed=with_removed)
    sweep(context.data_dir, models, context.settings.download_keep_s, now_at)
    return models


@operation("models.read")
def show_model(context: OperatorContext, name: str) -> ModelRecord:
    """One entry; see `list_models`."""
    list_models(context)
    with context.reading() as session:
        return catalog.get_model(session, name)


@operation("models.read")
def await_cleanup(context: OperatorContext, model: ModelRecord) -> None:
    """Wait a little until nothing of an ended registration is left on the disk."""
    folder = context.data_dir / DOWNLOADS_FOLDER / (download_name(model) or "none")
    deadline_s = time.monotonic() + CLEANUP_TIMEOUT_S
    list_models(context)
    while folder.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        list_models(context)


@operation("models.read")
def list_revisions(context: OperatorContext, name: str) -> list[RevisionRecord]:
    """What a model can be rolled back to, the oldest first."""
    with context.reading() as session:
        return revisions.list_revisions(session, name)


@operation("models.write", audit=("model.rollback",))
def roll_back(context: OperatorContext, name: str, to: str = "") -> ModelRecord:
    """Serve an earlier revision again; the running server follows within `key_cache_poll_s`."""
    with context.writing() as session:
        model = revisions.roll_back(session, name, to, now_at=context.clock())
        if not (context.packs_dir / model.pack).is_dir():
            raise RegistryError(
                f"the pack of revision {model.revision} is missing; register it again"
            )
        if is_old(context.packs_dir / model.pack):
            raise RegistryError(
                f"the pack of revision {model.revision} was made by an earlier release and cannot "
                f"be served; run `polyhost models update {name}` to make it again"
            )
        return model


@operation(
    "models.write",
    audit=(
        "model.pin",
        "model.unpin",
    ),
)
def set_pinned(context: OperatorContext, name: str, pinned: bool) -> ModelRecord:
    """A pinned model is never evicted."""
    with context.writing() as session:
        return catalog.set_pinned(session, name, pinned, now_at=context.clock())


@operation(
    "models.write",
    audit=(
        "model.load",
        "model.unload",
    ),
)
def request_residency(context: OperatorContext, name: str, action: ResidencyAction) -> None:
    """Ask the running server to load or unload a model. Raises RegistryError where none runs."""
    if not server_is_running(context.data_dir):
        raise RegistryError(
            f"no server is running on {context.data_dir}; a model is loaded by its first request, "
            f"and `polyhost models pin {name}` keeps it loaded"
        )
    with context.writing() as session:
        residency_requests.ask(session, name, action, now_at=context.clock())


@operation("models.write", audit=("model.remove",))
def remove_model(context: OperatorContext, name: str) -> bool:
    """Take a model out of service; its postings stay. True if unused packs were deleted now.

    Under a running server the worker may still be reading the pack, so the folder is left for
    the sweep at the server's next start.
    """
    with context.writing() as session:
        revisions.remove(session, name, now_at=context.clock())
    list_models(context)
    try:
        with locks.hold(context.data_dir / locks.SERVER_LOCK):
            return bool(sweep_packs(context.data_dir, context.engine))
    except locks.LockBusy:
        return False


def tidy(settings: Settings) -> None:
    """At a server's start: end registrations that died, delete what they left and unused packs."""
    with open_context(settings, "server") as context:
        list_models(context)
        if not settings.is_clustered:  # Other servers register models into the same folder.
            sweep_packs(context.data_dir, context.engine)


def sweep_packs(data_dir: Path, engine: Engine) -> list[str]:
    """Delete pack folders (and leftovers of broken registrations) that no ready model uses.

    For the holder of the server lock: at a server's start, before any worker reads packs, and in
    `remove_model` where no server runs. Does nothing while a registration is writing packs.
    Returns the names of what was deleted.
    """
    packs_dir = data_dir / PACKS_FOLDER
    if not packs_dir.is_dir():
        return []
    try:
        with locks.hold(data_dir / locks.PACKS_LOCK), reading(engine) as session:
            used = revisions.packs_in_use(session)
            unused = sorted(path for path in packs_dir.iterdir() if path.name not in used)
            for path in unused:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    except locks.LockBusy:
        return []
    return [path.name for path in unused]


@dataclass(frozen=True, slots=True)
class ModelView:
    """All that is known of one model. `job`: a registration of it that has not ended well: its
    own, or of a new revision."""

    model: ModelRecord
    job: ModelRecord | None
    price: PriceRecord | None
    revisions: list[RevisionRecord]
    sharing: Sequence[str] = ()
    """All names of its pack."""


@operation("models.read")
def models_page(
    context: OperatorContext,
    wanted: ModelFilter,
    sort: str,
    cut: Cut,
    load_s: Mapping[str, float] | None = None,
) -> tuple[Listed[ModelLine], ModelCounts]:
    """A page of the catalog, and how many there are in all. `load_s`: what loads take, by name."""
    _fail_lost(context)
    now_at = context.clock()
    with context.reading() as session:
        since_at = now_at - RECENT_S
        page = model_list.page(
            session, wanted, sort, cut, since_at=since_at, now_at=now_at, load_s=load_s
        )
        return page, model_list.counts(session)


@operation("models.read")
def model_view(context: OperatorContext, name: str) -> ModelView:
    """One model. Raises NotFound."""
    _fail_lost(context)
    name = name.removesuffix(NEXT)
    with context.reading() as session:
        model = catalog.get_model(session, name)
        job = model if model.state in ("registering", "failed") else None
        update = catalog.find_model(session, name + NEXT)
        if update is not None and update.state in ("registering", "failed"):
            job = update
        price = prices.prices_of(session, [name], context.clock()).get(name)
        shared = model_list.sharing(session, [name]).get(name, [])
        return ModelView(model, job, price, revisions.list_revisions(session, name), shared)


@operation("models.read")
def registrations_page(
    context: OperatorContext, wanted: RegistrationFilter, sort: str, cut: Cut
) -> tuple[Listed[Registration], Listed[Registration], dict[str, int]]:
    """A page of all registrations; those that go on, the newest first; how many by state."""
    _fail_lost(context)
    running = RegistrationFilter(state="registering")
    with context.reading() as session:
        return (
            registrations.page(session, wanted, sort, cut),
            registrations.page(session, running, "since", Cut(descending=True)),
            model_list.counts(session).by_state,
        )


@operation("models.read")
def model_traffic(context: OperatorContext, name: str, hours: int = 24) -> list[Hour]:
    """The last hours of a model, the present one included."""
    now_at = context.clock()
    with context.reading() as session:
        return model_list.hours(session, name, now_at - (hours - 1) * 3600.0, now_at)


@operation("models.read")
def served_names(context: OperatorContext) -> list[str]:
    """Of the models that may be served, the oldest first."""
    with context.reading() as session:
        return model_list.served_names(session)


@operation("models.read")
def sharing(context: OperatorContext, names: Collection[str]) -> dict[str, list[str]]:
    """Of each of these that is served, all names of its pack."""
    with context.reading() as session:
        return model_list.sharing(session, names)


@operation("models.read")
def pinned(context: OperatorContext, names: Collection[str]) -> set[str]:
    """Which of these models are."""
    with context.reading() as session:
        return model_list.pinned(session, names)


@operation("models.read")
def ask_rates(context: OperatorContext, names: Collection[str]) -> dict[str, float]:
    """How often each was asked for lately, in asks a second."""
    now_at = context.clock()
    with context.reading() as session:
        found = model_list.requests(session, names, now_at - RECENT_S)
    return {name: num / RECENT_S for name, num in found.items()}


def _fail_lost(context: OperatorContext) -> None:
    """Registrations whose process is gone become failed, and are cleaned up after."""
    now_at = context.clock()
    with context.reading() as session:
        running = model_list.registering(session)
    if any(
        now_at - (model.heartbeat_at or 0.0) > HEARTBEAT_TIMEOUT_S
        or not process_is_alive(model.registrar_host, model.registrar_pid)
        for model in running
    ):
        list_models(context)


@operation("models.read")
def check_name(context: OperatorContext, name: str) -> None:
    """Raises InvalidValue or AlreadyExists where no model can be registered under this name now."""
    if name.endswith(NEXT):
        raise InvalidValue(f"names that end in {NEXT} are reserved: choose another name")
    _fail_lost(context)  # a name whose registration died is free again
    with context.reading() as session:
        catalog.row_to_register(session, name)


@operation("models.write", audit=("model.add",))
def begin_registration(
    context: OperatorContext,
    name: str,
    source: str,
    dtype: str = "auto",
    pinned: bool = False,
    revision: str = "",
) -> ModelRecord:
    """Check the request and put the model into the catalog as `registering`, for this process.

    `source` is a folder or a hub id, `revision` a hub's branch, tag or commit. Follow with `run` or
    `run_detached`. Raises RegistryError.
    """
    check_name(context, name)
    place = place_of(source, revision, dtype)
    with context.writing() as session:
        return catalog.add_model(
            session,
            name,
            place,
            dtype=dtype,
            requested_revision=revision,
            pinned=pinned,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=context.clock(),
        )


@operation("models.write", audit=("model.add",))
def begin_update(
    context: OperatorContext, name: str, source: str = "", dtype: str = "", revision: str = ""
) -> ModelRecord:
    """Begin the registration of a new revision of a ready model, which is served meanwhile.

    What is not given is as it was: the same branch of the same repository, or the same folder.
    Raises RegistryError.
    """
    list_models(context)
    with context.reading() as session:
        model = catalog.get_model(session, name)
    was_hub = not source and is_hub(model.source)
    if not source:
        source = model.source
        revision = revision or model.requested_revision
    dtype = dtype or model.requested_dtype
    place = place_of(source, revision, dtype, was_hub)
    with context.writing() as session:
        return revisions.begin_update(
            session,
            name,
            place,
            dtype=dtype,
            requested_revision=revision,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=context.clock(),
        )


@operation("models.write", audit=("model.add",))
def retry_registration(context: OperatorContext, name: str) -> ModelRecord:
    """Begin a failed registration once more, of the same commit. Raises RegistryError."""
    list_models(context)
    with context.writing() as session:
        model = _job(catalog.list_models(session), name, "failed")
        if model is None:
            known = catalog.get_model(session, name)
            raise IllegalTransition(
                f"model {name!r} is {known.state}: only a failed registration can be retried"
            )
        return catalog.add_model(
            session,
            model.name,
            model.source,
            dtype=model.requested_dtype,
            requested_revision=model.requested_revision,
            source_commit=model.source_commit,
            pinned=model.pinned,
            weight=model.weight,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=context.clock(),
        )


@operation("models.write", audit=("model.failed",))
def cancel_registration(context: OperatorContext, name: str) -> ModelRecord:
    """End a registration, wherever it runs. Its process notices within OWNER_POLL_S.

    Raises RegistryError where nothing is being registered under that name.
    """
    list_models(context)
    with context.writing() as session:
        model = _job(catalog.list_models(session), name, "registering")
        if model is None:
            known = catalog.get_model(session, name)
            raise IllegalTransition(
                f"model {name!r} is {known.state}: there is no registration to cancel"
            )
        reason = f"cancelled by {context.actor}"
        catalog.fail(session, model.registration, CANCELLED, reason, now_at=context.clock())
    return model


def place_of(source: str, revision: str, dtype: str, was_hub: bool = False) -> str:
    """The source as the catalog has it: an absolute path, or a hub id.

    `was_hub`: it is one, also where a folder of that name happens to lie here.
    """
    if dtype not in DTYPES:
        raise InvalidValue(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = "" if was_hub else _folder(source)
    if folder:
        if revision:
            raise InvalidValue(
                f"{source} is a folder: leave out --revision, which is for hub models"
            )
        return folder
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise InvalidValue(
            f"{source[:200]} is neither a folder nor a model ID on the hub: give the folder that "
            "contains config.json, or an ID such as org/name"
        )
    if revision and not _REVISION.fullmatch(revision):
        raise InvalidValue(f"{revision!r} is not a valid branch, tag or commit")
    return source


def _folder(source: str) -> str:
    """The folder's absolute path; "" if it is none. Raises InvalidValue."""
    try:
        folder = Path(source).expanduser().resolve()
        if not folder.is_dir():
            return ""
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{source!r} is not valid UTF-8: rename the folder") from error
    except (OSError, RuntimeError):  # too long for a path; ~somebody who is not there
        return ""
    return str(folder)


def _job(models: Sequence[ModelRecord], name: str, state: str) -> ModelRecord | None:
    """The row of a registration in that state: NAME's own, or its update's."""
    names = (name, name.removesuffix(NEXT) + NEXT)
    return next((m for m in models if m.name in names and m.state == state), None)


@operation("models.read")
def chat_models(context: OperatorContext) -> list[str]:
    """Names of ready models that generate, the first ones by name; the caller may name others."""
    with context.reading() as session:
        return finding.chat_models(session, MAX_MODELS)
