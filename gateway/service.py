"""The operator's verbs: one function each, called by the CLI and later by the admin API.

A verb opens its own transaction, changes the registry, and returns plain records. It knows no
argparse, no HTTP and no printing. Registering a model is a long affair with a subprocess
(registration.py, registrar.py); what a verb raises is `registry.errors.RegistryError` (one line,
says what to do).
"""

import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gateway.registration_files import (
    DOWNLOADS_FOLDER,
    PACKS_FOLDER,
    download_name,
    is_alive,
    is_old,
    sweep,
)
from gateway.settings import Settings
from gateway.types import HostedModel
from registry import (
    api_keys,
    catalog,
    ledger,
    locks,
    prices,
    quotas,
    residency_requests,
    revisions,
    tenants,
)
from registry.api_keys import KeyChanges, KeyRecord
from registry.catalog import ModelRecord
from registry.errors import RegistryError
from registry.ledger import UsageRow
from registry.prices import PriceRecord
from registry.quotas import UNLIMITED, Limits
from registry.residency_requests import ResidencyAction
from registry.revisions import RevisionRecord
from registry.session import make_engine, reading, writing
from registry.tenants import TenantRecord

CLEANUP_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Control:
    """What every verb needs: the database, the data folder, who is acting, and the wall clock."""

    engine: Engine
    data_dir: Path
    actor: str
    clock: Callable[[], float] = time.time
    settings: Settings = field(default_factory=Settings)

    @property
    def packs_dir(self) -> Path:
        """Where pack folders lie, one for each revision."""
        return self.data_dir / PACKS_FOLDER

    def reading(self) -> AbstractContextManager[Session]:
        """A read-only session."""
        return reading(self.engine)

    def writing(self) -> AbstractContextManager[Session]:
        """A session that commits, in this actor's name."""
        return writing(self.engine, self.actor)


@contextmanager
def open_control(settings: Settings, actor: str) -> Iterator[Control]:
    """A Control over the settings' database, whose connections are closed at the end.

    The schema must be there (`registry.session.upgrade`).
    """
    engine = make_engine(settings.database_url)
    try:
        yield Control(engine, settings.data_path, actor, settings=settings)
    finally:
        engine.dispose()


# Tenants and keys.


def create_tenant(control: Control, name: str, weight: float = 1.0) -> TenantRecord:
    """A new tenant."""
    with control.writing() as session:
        return tenants.create_tenant(session, name, weight, now_at=control.clock())


def list_tenants(control: Control) -> list[TenantRecord]:
    """All tenants by name."""
    with control.reading() as session:
        return tenants.list_tenants(session)


def update_tenant(
    control: Control,
    name: str,
    weight: float | None = None,
    disabled: bool | None = None,
    priority: str | None = None,
    reserved_share: float | None = None,
) -> TenantRecord:
    """Change what is given."""
    with control.writing() as session:
        return tenants.update_tenant(
            session,
            name,
            weight=weight,
            disabled=disabled,
            priority=priority,
            reserved_share=reserved_share,
            now_at=control.clock(),
        )


def create_key(
    control: Control,
    tenant: str,
    name: str,
    *,
    limits: Limits | None = None,
    cache_mode: str = "off",
    allowed_models: Sequence[str] | None = None,
    expires_in_s: float | None = None,
    allowed_cidrs: Sequence[str] | None = None,
) -> tuple[KeyRecord, str]:
    """A new key of a tenant, and its plaintext (shown once)."""
    now_at = control.clock()
    with control.writing() as session:
        return api_keys.create_key(
            session,
            tenants.get_tenant(session, tenant).id,
            name,
            now_at=now_at,
            limits=limits,
            cache_mode=cache_mode,
            allowed_models=allowed_models,
            expires_at=None if expires_in_s is None else now_at + expires_in_s,
            allowed_cidrs=allowed_cidrs,
        )


def list_keys(control: Control, tenant: str | None = None) -> list[KeyRecord]:
    """Keys of one tenant or of all, revoked ones included."""
    with control.reading() as session:
        tenant_id = None if tenant is None else tenants.get_tenant(session, tenant).id
        return api_keys.list_keys(session, tenant_id)


def change_key(control: Control, key: str, changes: KeyChanges) -> KeyRecord:
    """Other bounds for a key; its secret stays."""
    with control.writing() as session:
        return api_keys.change(session, key, changes, now_at=control.clock())


def revoke_key(control: Control, key: str) -> KeyRecord:
    """Refuse the key from now on."""
    with control.writing() as session:
        return api_keys.revoke(session, key, now_at=control.clock())


def rotate_key(control: Control, key: str, grace_s: float = 0.0) -> tuple[KeyRecord, str]:
    """A new secret (shown once); the old one works for `grace_s` more seconds."""
    with control.writing() as session:
        return api_keys.rotate(session, key, grace_s, now_at=control.clock())


# Prices and usage.


def set_price(
    control: Control,
    model: str,
    prompt_nanos: int,
    cached_nanos: int,
    completion_nanos: int,
    valid_from: float | None = None,
) -> PriceRecord:
    """A price from `valid_from` (now where None) on. The model must be in the catalog."""
    now_at = control.clock()
    with control.writing() as session:
        name = catalog.get_model(session, model).name
        start = now_at if valid_from is None else valid_from
        price = PriceRecord(name, start, prompt_nanos, cached_nanos, completion_nanos)
        return prices.set_price(session, price, now_at=now_at)


def list_prices(control: Control, model: str | None = None) -> list[PriceRecord]:
    """All dated prices, those of removed models too."""
    with control.reading() as session:
        return prices.list_prices(session, model)


def export_usage(control: Control, from_at: float, to_at: float) -> Iterator[UsageRow]:
    """Postings of [from_at, to_at), streamed; a transaction lasts for one page only."""
    after: tuple[float, str] | None = None
    while True:
        with control.reading() as session:
            page = ledger.usage_page(session, from_at, to_at, after)
        yield from page
        if len(page) < ledger.PAGE_ROWS:
            return
        after = (page[-1].posting.posted_at, page[-1].posting.request_id)


# Models.


def list_models(control: Control, *, with_removed: bool = False) -> list[ModelRecord]:
    """The catalog; registrations whose process died are failed on the way, and cleaned up after."""
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
    with control.reading() as session:
        return revisions.list_revisions(session, name)


def roll_back(control: Control, name: str, to: str = "") -> ModelRecord:
    """Serve an earlier revision again; the running server follows within `key_cache_poll_s`."""
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
    with control.writing() as session:
        return catalog.set_pinned(session, name, pinned, now_at=control.clock())


def request_residency(control: Control, name: str, action: ResidencyAction) -> None:
    """Ask the running server to load or unload a model. Raises RegistryError where none runs."""
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
    with control.writing() as session:
        revisions.remove(session, name, now_at=control.clock())
    list_models(control)
    try:
        with locks.hold(control.data_dir / locks.SERVER_LOCK):
            return bool(sweep_packs(control.data_dir, control.engine))
    except locks.LockBusy:
        return False


def hosted_models(session: Session, data_dir: Path, now_at: float) -> list[HostedModel]:
    """The ready models as the request path needs them, with the prices that hold at `now_at`."""
    price_of = prices.prices_at(session, now_at)
    limits = quotas.all_limits(session, "model")
    hosted = []
    for model in catalog.ready_models(session):
        price = price_of.get(model.name, PriceRecord(model.name, 0.0))
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
                price_prompt_nanos=price.prompt_nanos,
                price_cached_nanos=price.cached_nanos,
                price_completion_nanos=price.completion_nanos,
                weight_bytes=model.weight_bytes,
                task=model.task,
                dim=model.dim,
                labels=tuple(model.labels),
                multi_label=model.multi_label,
                limits=limits.get(model.name, UNLIMITED),
            )
        )
    return hosted


def tidy(settings: Settings) -> None:
    """At a server's start: end registrations that died, delete what they left and unused packs."""
    with open_control(settings, "server") as control:
        list_models(control)
        sweep_packs(control.data_dir, control.engine)


def sweep_packs(data_dir: Path, engine: Engine | None = None) -> list[str]:
    """Delete pack folders (and leftovers of broken registrations) that no ready model uses.

    For the holder of the server lock: at a server's start, before any worker reads packs, and in
    `remove_model` where no server runs. Does nothing while a registration is writing packs.
    Returns the names of what was deleted.
    """
    packs_dir = data_dir / PACKS_FOLDER
    if not packs_dir.is_dir():
        return []
    own = make_engine(Settings(data_dir=str(data_dir)).database_url) if engine is None else engine
    try:
        with locks.hold(data_dir / locks.PACKS_LOCK), reading(own) as session:
            used = revisions.packs_in_use(session)
            unused = sorted(path for path in packs_dir.iterdir() if path.name not in used)
            for path in unused:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
    except locks.LockBusy:
        return []
    finally:
        if engine is None:
            own.dispose()
    return [path.name for path in unused]


# This machine.


def server_is_running(data_dir: Path) -> bool:
    """Does a server hold this data folder?"""
    return locks.is_held(data_dir / locks.SERVER_LOCK)


def process_is_alive(host: str, pid: int) -> bool:
    """Is the process there? Of another machine's processes only their heartbeats tell."""
    return host != socket.gethostname() or is_alive(pid)
