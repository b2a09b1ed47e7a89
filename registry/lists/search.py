"""Models, tenants and keys by a part of their name, a few of each, for a search field.

Names that begin with the text come first, then by name. Whose things may be seen is the caller's to
say (admin/operations/server.py).
"""

from collections.abc import Collection

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from registry.accounts.api_keys import ApiKey
from registry.accounts.key_terms import INFERENCE
from registry.accounts.tenants import Tenant
from registry.accounts.users import User, UserRole
from registry.models.catalog import Model


def models(session: Session, text: str, limit: int) -> list[tuple[str, str]]:
    """(name, state) of models that are not removed."""
    query = select(Model.name, Model.state).where(Model.state != "removed", _has(Model.name, text))
    rows = session.execute(query.order_by(*_order(Model.name, text)).limit(limit))
    return [(name, state) for name, state in rows]


def chat_models(session: Session, limit: int) -> list[str]:
    """Names of ready models that generate, by name."""
    query = select(Model.name).where(Model.state == "ready", Model.task == "generate")
    return list(session.scalars(query.order_by(Model.name).limit(limit)))


def known_models(session: Session, names: Collection[str]) -> set[str]:
    """Those of the names that a model has, in whatever state but removed."""
    query = select(Model.name).where(Model.name.in_(names), Model.state != "removed")
    return set(session.scalars(query))


def model_names(session: Session, limit: int) -> list[str]:
    """Names of models that are not removed, the first ones by name."""
    query = select(Model.name).where(Model.state != "removed").order_by(Model.name).limit(limit)
    return list(session.scalars(query))


def tenants(
    session: Session, text: str, limit: int, seen: Collection[str] | None
) -> list[tuple[str, str]]:
    """(id, name); of these tenants alone where `seen` names them."""
    query = select(Tenant.id, Tenant.name).where(or_(_has(Tenant.name, text), Tenant.id == text))
    if seen is not None:
        query = query.where(Tenant.id.in_(seen))
    rows = session.execute(query.order_by(*_order(Tenant.name, text)).limit(limit))
    return [(tenant_id, name) for tenant_id, name in rows]


def keys(
    session: Session, text: str, limit: int, seen: Collection[str] | None
) -> list[tuple[str, str, str, str]]:
    """(id, public id, name, tenant's name), by name, id or public id, revoked ones too."""
    named = or_(
        _has(ApiKey.name, text),
        ApiKey.id == text,
        ApiKey.public_id.startswith(text, autoescape=True),
    )
    query = select(ApiKey.id, ApiKey.public_id, ApiKey.name, Tenant.name)
    query = query.join(Tenant, Tenant.id == ApiKey.tenant_id).where(named)
    if seen is not None:
        query = query.where(ApiKey.tenant_id.in_(seen))
    rows = session.execute(query.order_by(*_order(ApiKey.name, text), ApiKey.id).limit(limit))
    return [(key_id, public_id, name, tenant) for key_id, public_id, name, tenant in rows]


def users(session: Session, text: str, limit: int, seen: Collection[str] | None) -> list[str]:
    """Names; of those alone who have a role for one of these tenants where `seen` names them."""
    query = select(User.name).where(_has(User.name, text))
    if seen is not None:
        query = query.where(
            User.id.in_(select(UserRole.user_id).where(UserRole.tenant_id.in_(seen)))
        )
    return list(session.scalars(query.order_by(*_order(User.name, text)).limit(limit)))


def key_titles(session: Session, ids: Collection[str]) -> list[tuple[str, str, str]]:
    """(id, name, tenant's name) of keys of these ids."""
    query = select(ApiKey.id, ApiKey.name, Tenant.name)
    query = query.join(Tenant, Tenant.id == ApiKey.tenant_id).where(ApiKey.id.in_(ids))
    return [(key_id, name, tenant) for key_id, name, tenant in session.execute(query)]


def working_keys(
    session: Session, limit: int, seen: Collection[str] | None, *, now_at: float
) -> list[tuple[str, str, str, str, bool]]:
    """(id, public id, name, tenant's name, whether it is a key of the operator's own for requests)
    of keys that are let in now: the operator's own first, then the newest."""
    query = (
        select(ApiKey, Tenant.name, Tenant.internal)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now_at),
            Tenant.disabled.is_(False),
        )
    )
    if seen is not None:
        query = query.where(ApiKey.tenant_id.in_(seen))
    order = Tenant.internal.desc(), ApiKey.created_at.desc(), ApiKey.id
    rows = session.execute(query.order_by(*order).limit(limit))
    return [
        (key.id, key.public_id, key.name, tenant, internal and INFERENCE in key.scopes)
        for key, tenant, internal in rows
    ]


def _has(column: InstrumentedAttribute[str], text: str) -> ColumnElement[bool]:
    return func.lower(column).contains(text.lower(), autoescape=True)


def _order(
    column: InstrumentedAttribute[str], text: str
) -> tuple[ColumnElement[int], InstrumentedAttribute[str]]:
    begins = func.lower(column).startswith(text.lower(), autoescape=True)
    return case((begins, 0), else_=1), column
