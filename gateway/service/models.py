"""The verbs on hosted models, for the CLI and, later, the admin API and pages (control.py).

Registering one is a long affair with a subprocess (registration.py, registrar.py). Here too: what
the request path gets to know of models (`hosted_models`), and deleting packs that nobody uses.
"""

import shutil
import time
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gateway.registration.registration_files import (
    DOWNLOADS_FOLDER,
    PACKS_FOLDER,
    download_name,
    is_old,
    sweep,
)
from gateway.service.control import (
    Control,
    open_control,
    process_is_alive,
    require,
    server_is_running,
)
from gateway.settings import Settings
from gateway.types import HostedModel
from registry import catalog, floors, locks, quotas, residency_requests, revisions
from registry.catalog import ModelRecord
from registry.errors import RegistryError
from registry.quotas import UNLIMITED
from registry.residency_requests import ResidencyAction
from registry.revisions import RevisionRecord
from registry.session import reading

CLEANUP_TIMEOUT_S = 3.0


def list_models(control: Control, *, with_removed: bool = False) -> list[ModelRecord]:
    """The catalog; registrations whose process died are failed on the way, and cleaned up after."""
    require(control, "models.read")
    now_at = control.clock()
    with control.reading() as session:
        models = catalog.list_models(session, with_removed=with_removed)
    if any(model.state == "registering" for model in models):
        with control.writing() as session:
            catalog.fail_interrupted(session, process_is_alive, now_at=now_at)
            models = catalog.list_models(session, with_removed=with_removed)
    sweep(control.data_dir, models, control.settings.download_keep_s, now_at)
    return models


def show_model(control: Control, name: str) -> ModelRecord:
    """One entry; see `list_models`."""
    list_models(control)
    with control.reading() as session:
        return catalog.get_model(session, name)


def await_cleanup(control: Control, model: ModelRecord) -> None:
    """Wait a little until nothing of an ended registration is left on the disk."""
    folder = control.data_dir / DOWNLOADS_FOLDER / (download_name(model) or "none")
    deadline_s = time.monotonic() + CLEANUP_TIMEOUT_S
    list_models(control)
    while folder.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        list_models(control)


def list_revisions(control: Control, name: str) -> list[RevisionRecord]:
    """What a model can be rolled back to, the oldest first."""
    require(control, "models.read")
    with control.reading() as session:
        return revisions.list_revisions(session, name)


def roll_back(control: Control, name: str, to: str = "") -> ModelRecord:
    """Serve an earlier revision again; the running server follows within `key_cache_poll_s`."""
    require(control, "models.write")
    with control.writing() as session:
        model = revisions.roll_back(session, name, to, now_at=control.clock())
        if not (control.packs_dir / model.pack).is_dir():
            raise RegistryError(f"the pack of revision {model.revision} is gone: register it again")
        if is_old(control.packs_dir / model.pack):
            raise RegistryError(
                f"the pack of revision {model.revision} was made by an earlier release and could "
                f"not be served: `polyhost models update {name}` makes it anew"
            )
        return model


def set_pinned(control: Control, name: str, pinned: bool) -> ModelRecord:
    """A pinned model is never evicted."""
    require(control, "models.write")
    with control.writing() as session:
        return catalog.set_pinned(session, name, pinned, now_at=control.clock())


def request_residency(control: Control, name: str, action: ResidencyAction) -> None:
    """Ask the running server to load or unload a model. Raises RegistryError where none runs."""
    require(control, "models.write")
    if not server_is_running(control.data_dir):
        raise RegistryError(
            f"no server is running on {control.data_dir}: models are loaded when they are asked "
            f"for, and `polyhost models pin {name}` keeps one resident"
        )
    with control.writing() as session:
        residency_requests.ask(session, name, action, now_at=control.clock())


def remove_model(control: Control, name: str) -> bool:
    """Take a model out of service; its postings stay. True if unused packs were deleted now.

    Under a running server the worker may still be reading the pack, so the folder is left for
    the sweep at the server's next start.
    """
    require(control, "models.write")
    with control.writing() as session:
        revisions.remove(session, name, now_at=control.clock())
    list_models(control)
    try:
        with locks.hold(control.data_dir / locks.SERVER_LOCK):
            return bool(sweep_packs(control.data_dir, control.engine))
    except locks.LockBusy:
        return False


def hosted_models(session: Session, data_dir: Path) -> list[HostedModel]:
    """The ready models as the request path needs them."""
    limits, kept = quotas.all_limits(session, "model"), floors.by_model(session)
    hosted = []
    for model in catalog.ready_models(session):
        hosted.append(
            HostedModel(
                name=model.name,
                revision=model.revision,
                pack_dir=str(data_dir / PACKS_FOLDER / model.pack),
                max_context=model.max_context,
                vocab_size=model.vocab_size,
                created_at=int(model.created_at),
                pinned=model.pinned,
                weight=model.weight,
                weight_bytes=model.weight_bytes,
                task=model.task,
                dim=model.dim,
                labels=tuple(model.labels),
                multi_label=model.multi_label,
                limits=limits.get(model.name, UNLIMITED),
                floors=kept.get(model.name, ()),
            )
        )
    return hosted


def tidy(settings: Settings) -> None:
    """At a server's start: end registrations that died, delete what they left and unused packs."""
    with open_control(settings, "server") as control:
        list_models(control)
        sweep_packs(control.data_dir, control.engine)


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
