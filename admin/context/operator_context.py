"""What every operation needs: who acts with which rights, on which registry, at what time.

A command acts with all rights: whoever can run it on the data folder could read and write that
anyway. A user of the pages acts with the roles that the user has (`acting_as`).
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from admin.context.policy import permissions
from admin.context.policy.permissions import INSTALLATION, OPERATING_SYSTEM, Grants, Verb
from admin.context.registration_files import is_alive
from gateway.redis.registry_pubsub import RegistryPubsub
from gateway.settings.settings import PACKS_FOLDER, Settings
from registry import locks
from registry.accounts import api_keys, tenants
from registry.accounts.api_keys import KeyRecord
from registry.accounts.tenants import TenantRecord
from registry.accounts.users import UserRecord
from registry.errors import Forbidden, NotFound
from registry.session import make_engine, reading, report_busy, writing


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """The database, the data folder, who acts with which rights, and the wall clock."""

    engine: Engine
    data_dir: Path
    actor: str
    clock: Callable[[], float] = time.time
    settings: Settings = field(default_factory=Settings)
    grants: Grants = field(default_factory=lambda: OPERATING_SYSTEM)
    user_id: str = ""
    """Of a user of the pages."""

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
        with report_busy(), writing(self.engine, self.actor) as session:
            yield session
        if self.settings.redis_url:
            RegistryPubsub(self.settings.redis_url, self.settings.redis_prefix).publish()


@contextmanager
def open_context(settings: Settings, actor: str) -> Iterator[OperatorContext]:
    """A context over the settings' database, whose connections are closed at the end.

    The schema must be there (`registry.schema.upgrade`).
    """
    engine = make_engine(settings.registry_url)
    try:
        yield OperatorContext(engine, settings.data_path, actor, settings=settings)
    finally:
        engine.dispose()


def acting_as(context: OperatorContext, user: UserRecord) -> OperatorContext:
    """The same registry, in a user's name and with that user's rights."""
    grants = {} if user.disabled else dict(user.roles)
    return replace(context, actor=f"admin:{user.name}", grants=grants, user_id=user.id)


def require(context: OperatorContext, verb: Verb, tenant_id: str = INSTALLATION) -> None:
    """Raises Forbidden where who acts may not do this: to a tenant's things, or to all."""
    if not permissions.allowed(context.grants, verb, tenant_id):
        raise Forbidden(f"{context.actor} does not have the right {verb}; ask an owner for a role")


def visible(context: OperatorContext, verb: Verb) -> frozenset[str] | None:
    """The tenants whose things a list may show; None: all. Raises Forbidden where there is none."""
    found = permissions.tenants_allowed(context.grants, verb)
    if found is not None and not found:
        require(context, verb)
    return found


def find_tenant(
    context: OperatorContext, session: Session, tenant: str, verb: Verb
) -> TenantRecord:
    """The tenant of that name or id, if who acts may do this to it.

    Raises NotFound, or Forbidden: to those who may not see others, no tenant is like another's.
    """
    try:
        found = tenants.get_tenant(session, tenant)
    except NotFound:
        require(context, verb)
        raise
    _require_of_some(context, verb, found.id)
    return found


def find_key(context: OperatorContext, session: Session, key: str, verb: Verb) -> KeyRecord:
    """The key of that id or public id, as `find_tenant`."""
    try:
        found = api_keys.get_key(session, key)
    except NotFound:
        require(context, verb)
        raise
    _require_of_some(context, verb, found.tenant_id)
    return found


def _require_of_some(context: OperatorContext, verb: Verb, tenant_id: str) -> None:
    """As where there is no such tenant, so that a refusal does not tell."""
    if not permissions.allowed(context.grants, verb, tenant_id):
        require(context, verb)


def server_is_running(data_dir: Path) -> bool:
    """Does a server hold this data folder?"""
    return locks.is_held(data_dir / locks.SERVER_LOCK)


def process_is_alive(host: str, pid: int) -> bool:
    """Is the process there? Of another machine's processes only their heartbeats tell."""
    return host != socket.gethostname() or is_alive(pid)
