"""What every verb of the operator needs: who acts, on which registry, at what time.

The verbs themselves are one function each, called by the CLI and later by the admin API: tenants
(service/tenants.py), keys (service/keys.py), limits (service/limits.py), models
(service/models.py, registration.py), prices (service/prices.py), usage (service/usage.py), users
(service/users.py), the audit log (service/audit.py). A verb first says who may do it (`require` and
its kin, by policy/permissions.py), opens its own transaction, changes the registry, and returns
plain records. It knows no argparse, no HTTP and no printing; what it raises is
`registry.errors.RegistryError` (one line, says what to do).

A command acts with all rights: whoever can run it on the data folder could read and write that
anyway. A user of the admin API acts with the roles that the user has (`acting_as`).
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from gateway.policy import permissions
from gateway.policy.permissions import INSTALLATION, OPERATING_SYSTEM, Grants, Verb
from gateway.registration.registration_files import PACKS_FOLDER, is_alive
from gateway.settings import Settings
from gateway.store.bell import Bell
from registry import api_keys, locks, tenants
from registry.api_keys import KeyRecord
from registry.errors import Forbidden, NotFound
from registry.session import busy_is_told, make_engine, reading, writing
from registry.tenants import TenantRecord
from registry.users import UserRecord


@dataclass(frozen=True, slots=True)
class Control:
    """What every verb needs: the database, the data folder, who is acting with what rights, and the
    wall clock."""

    engine: Engine
    data_dir: Path
    actor: str
    clock: Callable[[], float] = time.time
    settings: Settings = field(default_factory=Settings)
    grants: Grants = field(default_factory=lambda: OPERATING_SYSTEM)

    @property
    def packs_dir(self) -> Path:
        """Where pack folders lie, one for each revision."""
        return self.data_dir / PACKS_FOLDER

    def reading(self) -> AbstractContextManager[Session]:
        """A read-only session."""
        return reading(self.engine)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that commits, in this actor's name; gateways on one Redis look at once."""
        with busy_is_told(), writing(self.engine, self.actor) as session:
            yield session
        if self.settings.redis_url:
            Bell(self.settings.redis_url, self.settings.redis_prefix).ring()


@contextmanager
def open_control(settings: Settings, actor: str) -> Iterator[Control]:
    """A Control over the settings' database, whose connections are closed at the end.

    The schema must be there (`registry.session.upgrade`).
    """
    engine = make_engine(settings.registry_url)
    try:
        yield Control(engine, settings.data_path, actor, settings=settings)
    finally:
        engine.dispose()


def acting_as(control: Control, user: UserRecord) -> Control:
    """The same registry, in a user's name and with that user's rights."""
    grants = {} if user.disabled else dict(user.roles)
    return replace(control, actor=f"admin:{user.name}", grants=grants)


def require(control: Control, verb: Verb, tenant_id: str = INSTALLATION) -> None:
    """Raises Forbidden where who acts may not do this: to a tenant's things, or to all."""
    if not permissions.allowed(control.grants, verb, tenant_id):
        raise Forbidden(f"{control.actor} may not do this ({verb}): ask an owner for a role")


def visible(control: Control, verb: Verb) -> frozenset[str] | None:
    """The tenants whose things a list may show; None: all. Raises Forbidden where there is none."""
    found = permissions.tenants_allowed(control.grants, verb)
    if found is not None and not found:
        require(control, verb)
    return found


def find_tenant(control: Control, session: Session, tenant: str, verb: Verb) -> TenantRecord:
    """The tenant of that name or id, if who acts may do this to it.

    Raises NotFound, or Forbidden: to those who may not see others, no tenant is like another's.
    """
    try:
        found = tenants.get_tenant(session, tenant)
    except NotFound:
        require(control, verb)
        raise
    _require_of_some(control, verb, found.id)
    return found


def find_key(control: Control, session: Session, key: str, verb: Verb) -> KeyRecord:
    """The key of that id or public id, as `find_tenant`."""
    try:
        found = api_keys.get_key(session, key)
    except NotFound:
        require(control, verb)
        raise
    _require_of_some(control, verb, found.tenant_id)
    return found


def _require_of_some(control: Control, verb: Verb, tenant_id: str) -> None:
    """As where there is no such tenant, so that a refusal does not tell."""
    if not permissions.allowed(control.grants, verb, tenant_id):
        require(control, verb)


def server_is_running(data_dir: Path) -> bool:
    """Does a server hold this data folder?"""
    return locks.is_held(data_dir / locks.SERVER_LOCK)


def process_is_alive(host: str, pid: int) -> bool:
    """Is the process there? Of another machine's processes only their heartbeats tell."""
    return host != socket.gethostname() or is_alive(pid)
