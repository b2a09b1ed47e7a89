"""The table of operations: each has typed parameters, a result, a permission and its audit entries,
and commands and pages call them and reach no further."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from sqlalchemy import select

from admin.context.operator_context import OperatorContext, acting_as, open_context
from admin.operations import keys as service_keys
from admin.operations import limits as service_alerts
from admin.operations import limits as service_limits
from admin.operations import models
from admin.operations import models as service_models
from admin.operations import prices as service_prices
from admin.operations import tenants as service_tenants
from admin.operations import usage as service_usage
from admin.operations import users as service_users
from admin.table import MODULES, OPERATIONS
from gateway.settings.settings import Settings
from registry import audit, locks, schema
from registry.accounts import users
from registry.accounts.api_keys import KeyChanges
from registry.errors import Forbidden, NotFound
from registry.models import catalog, revisions
from registry.models.catalog import PackFacts
from registry.money.prices import PriceRecord
from tests.migrated import migrated

ADMIN = Path(__file__).resolve().parents[3] / "admin"
# These take a context and are no operations: they make a user of a request, tell how far the ledger
# goes (a number that tells nothing), look at a job that an operation gave, or tidy up.
PLUMBING = frozenset(
    {
        *("sessions.sign_in", "sessions.who", "sessions.ended", "sessions.sign_out"),
        *("sessions.take_turn", "sessions.take_code_turn", "sessions.give_back"),
        *("sessions.remember", "sessions.sign_in_as", "usage.newest_seq", "limits.resolve_owner"),
        *("export_jobs.tidy", "export_jobs.asked_by", "export_jobs.may_change"),
    }
)
# Their names tell what they find: opening the registry, and making names.
FUNCTIONS = frozenset(
    {
        *("locks", "schema", "upgrade", "database_exists", "shown", "random_token", "base32"),
        "listed_rows",
    }
)

SECRET = "a secret of nobody"


def calls(node: ast.AST) -> set[str]:
    """The bare names and last attributes that are called."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    names = {function.id for function in functions if isinstance(function, ast.Name)}
    return names | {function.attr for function in functions if isinstance(function, ast.Attribute)}


def test_every_public_function_over_the_registry_is_an_operation() -> None:
    public = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in MODULES
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
        if not name.startswith("_") and "context" in inspect.signature(value).parameters
    }
    assert public - OPERATIONS.keys() == PLUMBING
    assert len(OPERATIONS) > 80


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_typed_and_says_who_may_and_what_it_leaves(name: str) -> None:
    operation = OPERATIONS[name]
    for parameter in operation.parameters.values():
        assert parameter.annotation is not parameter.empty, parameter
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    assert operation.result is not inspect.Signature.empty
    assert inspect.getdoc(operation.run)
    assert bool(operation.permissions) == (operation.on != "own")
    changes = {verb for verb in operation.permissions if verb.endswith(".write")}
    inner = ast.parse(inspect.getsource(inspect.unwrap(operation.run)))
    if "writing" in calls(inner):
        assert operation.audit, "it changes something"
        assert changes or operation.on == "own" or name.split(".")[0] in ("export_jobs", "models")
    if name.split(".")[0] == "export_jobs":
        return  # who asked for an export may change it
    assert changes or operation.on == "own" or not operation.audit or name == "models.list_models"


def test_nobody_without_a_role_may_anything(context: OperatorContext) -> None:
    nobody = replace(context, actor="admin:eve", grants={})
    for operation in OPERATIONS.values():
        if operation.on == "own":
            continue
        needed = [p for p in operation.parameters.values() if p.default is p.empty]
        with pytest.raises(Forbidden, match=r"admin:eve does not have the right"):
            operation.run(nobody, **{p.name: None for p in needed})


def test_commands_and_pages_call_operations_and_nothing_below_them() -> None:
    """Of the registry they take nouns and constants, and open no transaction."""
    wrong = []
    for folder in ("cli", "pages", "web"):
        for path in sorted(ADMIN.glob(f"{folder}/*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if calls(tree) & {"writing", "appending"}:
                wrong.append(f"{path.name} writes")
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("registry"):
                    named = {alias.name for alias in node.names if alias.name[0].islower()}
                    wrong += [f"{path.name}: {name}" for name in named - FUNCTIONS]
    assert wrong == []


# One change by each operation that writes, in an order in which they go. Beside `key`, a key's id.
CHANGES: dict[str, Callable[[OperatorContext, str], Any]] = {
    "tenants.create_tenant": lambda c, key: service_tenants.create_tenant(c, "crowd"),
    "tenants.update_tenant": lambda c, key: service_tenants.update_tenant(c, "acme", 2.0),
    "tenants.set_model_floor": lambda c, key: service_tenants.set_model_floor(c, "acme", 1, ["m"]),
    "keys.create_key": lambda c, key: service_keys.create_key(c, "acme", "second"),
    "keys.change_key": lambda c, key: service_keys.change_key(
        c, key, KeyChanges(allowed_cidrs=["10.0.0.0/8"])
    ),
    "keys.rotate_key": lambda c, key: service_keys.rotate_key(c, key),
    "keys.revoke_key": lambda c, key: service_keys.revoke_key(c, key),
    "limits.set_limits": lambda c, key: service_limits.set_limits(
        c, "key", key, {"tokens_per_minute": 5}
    ),
    "limits.add_alert": lambda c, key: service_alerts.add_alert(
        c, "key", key, "month", 100, [50], "https://example.test/hook"
    ),
    "limits.remove_alert": lambda c, key: service_alerts.remove_alert(
        c, service_alerts.list_alerts(c)[0].rule.id
    ),
    "prices.set_price": lambda c, key: service_prices.set_price(c, PriceRecord("m", 0, 7)),
    "prices.create_plan": lambda c, key: service_prices.create_plan(c, "gold", 100),
    "prices.set_plan_discount": lambda c, key: service_prices.set_plan_discount(
        c, "gold", 200, c.clock() + 1000
    ),
    "prices.set_plan_price": lambda c, key: service_prices.set_plan_price(
        c, "gold", "m", PriceRecord("m", 0, 5)
    ),
    "prices.set_terms": lambda c, key: service_prices.set_terms(c, "acme", "gold", 10),
    "users.create_user": lambda c, key: service_users.create_user(c, "bob", SECRET, "viewer"),
    "users.set_role": lambda c, key: service_users.set_role(c, "bob", "admin", "acme"),
    "users.set_user_disabled": lambda c, key: service_users.set_user_disabled(c, "bob", True),
    "users.set_password": lambda c, key: service_users.set_password(c, "bob", SECRET + "!"),
    "users.bind": lambda c, key: service_users.bind(c, "bob", "7", "https://id.test"),
    "users.unbind": lambda c, key: service_users.unbind(c, "bob", "https://id.test"),
    "users.unlock": lambda c, key: service_users.unlock(c, "bob"),
    "users.remove_user": lambda c, key: service_users.remove_user(c, "bob"),
    "models.set_pinned": lambda c, key: service_models.set_pinned(c, "m", True),
    "models.request_residency": lambda c, key: _running(
        c, lambda: service_models.request_residency(c, "m", "load")
    ),
    "models.roll_back": lambda c, key: service_models.roll_back(c, "m", "rev1"),
    "models.begin_registration": lambda c, key: models.begin_registration(
        c, "other", str(c.data_dir)
    ),
    "models.list_models": lambda c, key: _interrupted(c),
    "models.retry_registration": lambda c, key: models.retry_registration(c, "other"),
    "models.cancel_registration": lambda c, key: models.cancel_registration(c, "other"),
    "models.begin_update": lambda c, key: models.begin_update(c, "m", str(c.data_dir)),
    "models.remove_model": lambda c, key: service_models.remove_model(c, "m"),
}
# These need a ledger with something in it, a server, or are done by who signs in: their own tests
# look at what they leave.
ELSEWHERE = frozenset(
    {
        "sessions.end_session",
        "sessions.change_own_password",
        "export_jobs.ask_export",
        "export_jobs.cancel_export",
        "export_jobs.retry_export",
        "export_jobs.remove_export",
        "export_jobs.open_export",
        *("cache.purge_cache", "cache.list_entries", "cache.show_entry"),
        *("invoices.create_invoice", "invoices.create_all"),
        *("usage.correct_usage", "prices.withdraw_price"),
        *("prices.withdraw_plan_entry", "prices.withdraw_terms"),
        "usage.keep_usage_from",
        "workers.order_workers",
    }
)


def _running(context: OperatorContext, act: Callable[[], None]) -> None:
    with locks.hold(context.data_dir / locks.SERVER_LOCK):
        act()


def _interrupted(context: OperatorContext) -> None:
    """Whoever lists ends registrations whose process is gone."""
    with context.writing() as session:
        row = session.scalars(select(catalog.Model).where(catalog.Model.name == "other")).one()
        row.heartbeat_at = 0.0
    service_models.list_models(context)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperatorContext]:
    """The tenant `acme` with a key, the ready model `m` of two revisions, the owner `ann`."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(users, "PasswordHasher", lambda: quick)
    settings = Settings(data_dir=str(tmp_path / "data"))
    settings.data_path.mkdir()
    migrated(settings.registry_url)
    with open_context(settings, "cli:ann") as context:
        service_tenants.create_tenant(context, "acme")
        service_users.create_user(context, "ann", SECRET, "owner")
        now_at = context.clock()
        with context.writing() as session:
            model = catalog.add_model(session, "m", str(settings.data_path), now_at=now_at)
            catalog.finish(session, model.registration, facts("rev1"), now_at=now_at)
            model = revisions.begin_update(
                session,
                "m",
                str(settings.data_path),
                dtype="auto",
                requested_revision="",
                registrar_host="",
                registrar_pid=0,
                now_at=now_at,
            )
            revisions.finish(session, model.registration, facts("rev2"), keep=3, now_at=now_at)
        yield context


def facts(revision: str) -> PackFacts:
    return PackFacts(revision, revision, "llama", "float32", 1, 2, 3)


def test_every_change_leaves_who_what_and_both_sides(
    context: OperatorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = {name for name, each in OPERATIONS.items() if each.audit}
    assert changing == CHANGES.keys() | ELSEWHERE, "say in CHANGES how each is called"
    monkeypatch.setattr(service_models, "is_old", lambda path: False)
    (context.packs_dir / "rev1").mkdir(parents=True)
    key, plaintext = service_keys.create_key(context, "acme", "first")
    secrets = [plaintext[-43:], SECRET]
    for name, change in CHANGES.items():
        with context.reading() as session:
            last, before = audit.latest(session, 1)[0].id, audit.current_version(session)
        change(context, key.id)
        with context.reading() as session:
            added = [entry for entry in audit.latest(session) if entry.id > last]
            after = audit.current_version(session)
        assert added, name
        assert {entry.action for entry in added} <= set(OPERATIONS[name].audit), name
        assert after > before, name
        assert {entry.actor for entry in added} == {"cli:ann"}, name
        asked = all(entry.action in ("model.load", "model.unload") for entry in added)
        assert asked or any(entry.before or entry.after for entry in added), name
    with context.reading() as session:
        text = repr(audit.latest(session, 1000))
        digests = session.scalars(select(schema.metadata.tables["api_keys"].c.digest)).all()
    assert not [secret for secret in secrets if secret in text]
    assert not [digest for digest in digests if digest.hex() in text or repr(digest) in text]


def test_a_tenants_user_sees_and_manages_that_tenant_alone(context: OperatorContext) -> None:
    for name in ("crowd", "third"):
        service_tenants.create_tenant(context, name)
    keys = {
        name: service_keys.create_key(context, name, "k")[0] for name in ("acme", "crowd", "third")
    }
    service_limits.set_limits(context, "key", keys["crowd"].id, {"tokens_per_minute": 5})
    service_limits.set_limits(context, "tenant", "acme", {"tokens_per_minute": 6})
    service_users.create_user(context, "bob", SECRET, "admin", "acme")
    bob = service_users.set_role(context, "bob", "viewer", "crowd")
    actor = acting_as(context, bob)
    assert [t.name for t in service_tenants.list_tenants(actor)] == ["acme", "crowd"]
    assert {k.tenant_name for k in service_keys.list_keys(actor)} == {"acme", "crowd"}
    assert {found.name for found in service_limits.list_limits(actor)} == {"acme", "crowd: k"}
    made, _ = service_keys.create_key(actor, "acme", "by bob")
    service_keys.revoke_key(actor, made.public_id)
    with context.reading() as session:
        assert {entry.actor for entry in audit.latest(session, 2)} == {"admin:bob"}
    scope = service_usage.scope_of(actor, 0, 1, tenant="crowd")
    assert scope.tenant_id == keys["crowd"].tenant_id
    refused: list[Callable[[], object]] = [
        lambda: service_keys.create_key(actor, "crowd", "x"),
        lambda: service_keys.revoke_key(actor, keys["crowd"].id),
        lambda: service_keys.revoke_key(actor, keys["third"].id),
        lambda: service_keys.revoke_key(actor, "key_none"),
        lambda: service_keys.list_keys(actor, "third"),
        lambda: service_keys.list_keys(actor, "none"),
        lambda: service_limits.set_limits(actor, "tenant", "acme", {"tokens_per_minute": 0}),
        lambda: service_limits.show_limits(actor, "gateway", ""),
        lambda: service_tenants.update_tenant(actor, "acme", weight=9.0),
        lambda: service_tenants.create_tenant(actor, "fourth"),
        lambda: service_users.set_role(actor, "bob", "owner"),
        lambda: service_users.set_role(actor, "bob", "owner", "acme"),
        lambda: service_users.list_users(actor),
        lambda: service_models.list_models(actor),
        lambda: service_usage.scope_of(actor, 0, 1, tenant="third"),
        lambda: service_usage.scope_of(actor, 0, 1, key=keys["third"].id),
    ]
    messages = set()
    for act in refused:
        with pytest.raises(Forbidden, match=r"admin:bob does not have the right") as raised:
            act()
        messages.add(str(raised.value))
    assert not [text for text in messages if "third" in text or "none" in text]
    with pytest.raises(NotFound):
        service_keys.list_keys(context, "none")


def test_an_owner_of_a_tenant_gives_roles_for_it(context: OperatorContext) -> None:
    service_tenants.create_tenant(context, "crowd")
    service_users.create_user(context, "bob", SECRET, "owner", "acme")
    service_users.create_user(context, "eve", SECRET, "viewer", "crowd")
    actor = acting_as(context, service_users.list_users(context)[1])
    assert [user.name for user in service_users.list_users(actor)] == ["bob"]
    eve = service_users.set_role(actor, "eve", "viewer", "acme")
    assert set(eve.tenant_names.values()) == {"acme"}
    assert [list(u.tenant_names.values()) for u in service_users.list_users(actor)] == [
        ["acme"]
    ] * 2
    eve = service_users.list_users(context)[2]
    assert set(eve.tenant_names.values()) == {"acme", "crowd"}
    refused: tuple[Callable[[], object], ...] = (
        lambda: service_users.set_role(actor, "eve", "admin", "crowd"),
        lambda: service_users.set_role(actor, "eve", "admin"),
        lambda: service_users.set_password(actor, "eve", SECRET + "?"),
        lambda: service_users.set_user_disabled(actor, "eve", True),
        lambda: service_users.create_user(actor, "mallory", SECRET, "owner", "acme"),
    )
    for act in refused:
        with pytest.raises(Forbidden):
            act()


def test_a_disabled_user_may_nothing(context: OperatorContext) -> None:
    service_users.create_user(context, "bob", SECRET, "owner")
    actor = acting_as(context, service_users.set_user_disabled(context, "bob", True))
    with pytest.raises(Forbidden):
        service_tenants.list_tenants(actor)
