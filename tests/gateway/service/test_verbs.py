"""What holds for every verb of the operator: who may, what it leaves, that the CLI only calls it.

A verb is a public function of gateway/service/*.py or gateway/registration/registration.py that
takes a Control.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from sqlalchemy import select

from gateway.registration import registration
from gateway.service import alerts as service_alerts
from gateway.service import identities as service_identities
from gateway.service import keys as service_keys
from gateway.service import limits as service_limits
from gateway.service import models as service_models
from gateway.service import prices as service_prices
from gateway.service import tenants as service_tenants
from gateway.service import usage as service_usage
from gateway.service import users as service_users
from gateway.service.control import Control, acting_as, open_control
from gateway.settings import Settings
from registry import audit, catalog, locks, passwords, revisions, schema, version
from registry.api_keys import KeyChanges
from registry.catalog import PackFacts
from registry.errors import Forbidden, NotFound
from registry.prices import PriceRecord
from registry.session import upgrade

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = ROOT / "gateway"
CHECKS = frozenset({"require", "visible", "find_tenant", "find_key", "allowed"})
# What these are given was made by a verb that asked: `scope_of`.
SCOPED = frozenset({"Scope", "ExportOrder"})
# How far the ledger goes is a number that tells nothing; a session's token is its own right; a
# key's control has fewer rights than the one it is made of; tidying does what nobody need ask for;
# who signs in is nobody yet, and tries of it are counted, unaudited (registry/sign_ins.py).
FREE = frozenset(
    {
        "usage.newest_seq",
        "sessions.who",
        "sessions.ended",
        "sessions.sign_out",
        "sessions.take_turn",
        "identities.take_turn",
        "identities.give_back",
        "usage_buckets.as_key",
        "export_jobs.tidy",
    }
)
SECRET = "a secret of nobody"


@cache
def verbs() -> dict[str, ast.FunctionDef]:
    """By module and name."""
    found = {}
    for path in (*sorted(GATEWAY.glob("service/*.py")), GATEWAY / "registration/registration.py"):
        if path.stem == "control":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            first = node.args.args[0] if node.args.args else None
            if first is not None and ast.unparse(first.annotation or first) == "Control":
                found[f"{path.stem}.{node.name}"] = node
    return found


@cache
def helpers(module: str) -> dict[str, ast.FunctionDef]:
    """A module's private functions."""
    path = GATEWAY / f"service/{module}.py"
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if node.name.startswith("_")}


def calls(node: ast.AST) -> set[str]:
    """The bare names and last attributes that are called."""
    functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    names = {function.id for function in functions if isinstance(function, ast.Name)}
    return names | {function.attr for function in functions if isinstance(function, ast.Attribute)}


def test_every_verb_says_who_may() -> None:
    every = verbs()
    assert len(every) > 30
    local = {name.split(".")[1]: node for name, node in every.items()}

    def says(node: ast.FunctionDef, module: str, depth: int = 0) -> bool:
        taken = {ast.unparse(a.annotation) for a in node.args.args if a.annotation}
        named = calls(node)
        if named & CHECKS or taken & SCOPED or "resolve_owner" in named:
            return True
        near = {**local, **helpers(module)}
        return depth < 2 and any(
            says(near[name], module, depth + 1) for name in named & near.keys()
        )

    assert {name for name, node in every.items() if not says(node, name.split(".")[0])} == FREE


def test_the_command_line_calls_verbs_and_nothing_below_them() -> None:
    """Of the registry it takes nouns and constants; of its functions, those that open it."""
    opening = {"schema", "upgrade", "database_exists", "shown"}
    wrong = []
    for path in sorted(GATEWAY.glob("cli/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "registry"
            ):
                continue
            for alias in node.names:
                if alias.name[0].islower() and alias.name not in opening:
                    wrong.append(f"{path.name}: {node.module}.{alias.name}")
    assert wrong == []


# One change by each verb that writes, in an order in which they go. Beside `key`, a key's id.
CHANGES: dict[str, Callable[[Control, str], Any]] = {
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
    "alerts.add_alert": lambda c, key: service_alerts.add_alert(
        c, "key", key, "month", 100, [50], "https://example.test/hook"
    ),
    "alerts.remove_alert": lambda c, key: service_alerts.remove_alert(
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
    "identities.bind": lambda c, key: service_identities.bind(c, "bob", "7", "https://id.test"),
    "identities.unbind": lambda c, key: service_identities.unbind(c, "bob", "https://id.test"),
    "users.remove_user": lambda c, key: service_users.remove_user(c, "bob"),
    "models.set_pinned": lambda c, key: service_models.set_pinned(c, "m", True),
    "models.request_residency": lambda c, key: _running(
        c, lambda: service_models.request_residency(c, "m", "load")
    ),
    "models.roll_back": lambda c, key: service_models.roll_back(c, "m", "rev1"),
    "registration.begin": lambda c, key: registration.begin(c, "other", str(c.data_dir)),
    "models.list_models": lambda c, key: _interrupted(c),
    "registration.begin_retry": lambda c, key: registration.begin_retry(c, "other"),
    "registration.cancel": lambda c, key: registration.cancel(c, "other"),
    "registration.begin_update": lambda c, key: registration.begin_update(c, "m", str(c.data_dir)),
    "models.remove_model": lambda c, key: service_models.remove_model(c, "m"),
}
# These need a ledger with something in it, a server, or are done by who signs in: their own tests
# look at what they leave.
ELSEWHERE = frozenset(
    {
        "sessions.sign_in",
        "sessions.sign_out",
        "sessions.take_turn",
        "identities.sign_in_as",
        "identities.give_back",
        "export_jobs.ask_export",
        "export_jobs.cancel_export",
        "export_jobs.retry_export",
        "export_jobs.remove_export",
        "export_jobs.open_export",
        "export_jobs.tidy",
        "cache.purge_cache",
        "invoices.create_invoice",
        "ledger.correct_usage",
        "ledger.keep_usage_from",
    }
)


def _running(control: Control, act: Callable[[], None]) -> None:
    with locks.hold(control.data_dir / locks.SERVER_LOCK):
        act()


def _interrupted(control: Control) -> None:
    """Whoever lists ends registrations whose process is gone."""
    with control.writing() as session:
        row = session.scalars(select(catalog.Model).where(catalog.Model.name == "other")).one()
        row.heartbeat_at = 0.0
    service_models.list_models(control)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """The tenant `acme` with a key, the ready model `m` of two revisions, the owner `ann`."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "PasswordHasher", lambda: quick)
    settings = Settings(data_dir=str(tmp_path / "data"))
    settings.data_path.mkdir()
    upgrade(settings.registry_url)
    with open_control(settings, "cli:ann") as control:
        service_tenants.create_tenant(control, "acme")
        service_users.create_user(control, "ann", SECRET, "owner")
        now_at = control.clock()
        with control.writing() as session:
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
        yield control


def facts(revision: str) -> PackFacts:
    return PackFacts(revision, revision, "llama", "float32", 1, 2, 3)


def test_every_change_leaves_who_what_and_both_sides(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = {name for name, node in verbs().items() if "writing" in calls(node)}
    assert writing - CHANGES.keys() - ELSEWHERE == set(), "say in CHANGES how each is called"
    monkeypatch.setattr(service_models, "is_old", lambda path: False)
    (control.packs_dir / "rev1").mkdir(parents=True)
    key, plaintext = service_keys.create_key(control, "acme", "first")
    secrets = [plaintext[-43:], SECRET]
    for name, change in CHANGES.items():
        with control.reading() as session:
            last, before = audit.latest(session, 1)[0].id, version.current(session)
        change(control, key.id)
        with control.reading() as session:
            added = [entry for entry in audit.latest(session) if entry.id > last]
            after = version.current(session)
        assert added, name
        assert after > before, name
        assert {entry.actor for entry in added} == {"cli:ann"}, name
        asked = all(entry.action in ("model.load", "model.unload") for entry in added)
        assert asked or any(entry.before or entry.after for entry in added), name
    with control.reading() as session:
        text = repr(audit.latest(session, 1000))
        digests = session.scalars(select(schema.metadata.tables["api_keys"].c.digest)).all()
    assert not [secret for secret in secrets if secret in text]
    assert not [digest for digest in digests if digest.hex() in text or repr(digest) in text]


def test_a_tenants_user_sees_and_manages_that_tenant_alone(control: Control) -> None:
    for name in ("crowd", "third"):
        service_tenants.create_tenant(control, name)
    keys = {
        name: service_keys.create_key(control, name, "k")[0] for name in ("acme", "crowd", "third")
    }
    service_limits.set_limits(control, "key", keys["crowd"].id, {"tokens_per_minute": 5})
    service_limits.set_limits(control, "tenant", "acme", {"tokens_per_minute": 6})
    service_users.create_user(control, "bob", SECRET, "admin", "acme")
    bob = service_users.set_role(control, "bob", "viewer", "crowd")
    actor = acting_as(control, bob)
    assert [t.name for t in service_tenants.list_tenants(actor)] == ["acme", "crowd"]
    assert {k.tenant_name for k in service_keys.list_keys(actor)} == {"acme", "crowd"}
    assert {found.name for found in service_limits.list_limits(actor)} == {"acme", "crowd: k"}
    made, _ = service_keys.create_key(actor, "acme", "by bob")
    service_keys.revoke_key(actor, made.public_id)
    with control.reading() as session:
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
        with pytest.raises(Forbidden, match=r"admin:bob may not do this") as raised:
            act()
        messages.add(str(raised.value))
    assert not [text for text in messages if "third" in text or "none" in text]
    with pytest.raises(NotFound):
        service_keys.list_keys(control, "none")


def test_an_owner_of_a_tenant_gives_roles_for_it(control: Control) -> None:
    service_tenants.create_tenant(control, "crowd")
    service_users.create_user(control, "bob", SECRET, "owner", "acme")
    service_users.create_user(control, "eve", SECRET, "viewer", "crowd")
    actor = acting_as(control, service_users.list_users(control)[1])
    assert [user.name for user in service_users.list_users(actor)] == ["bob"]
    eve = service_users.set_role(actor, "eve", "viewer", "acme")
    assert set(eve.tenant_names.values()) == {"acme"}
    assert [list(u.tenant_names.values()) for u in service_users.list_users(actor)] == [
        ["acme"]
    ] * 2
    eve = service_users.list_users(control)[2]
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


def test_a_disabled_user_may_nothing(control: Control) -> None:
    service_users.create_user(control, "bob", SECRET, "owner")
    actor = acting_as(control, service_users.set_user_disabled(control, "bob", True))
    with pytest.raises(Forbidden):
        service_tenants.list_tenants(actor)
