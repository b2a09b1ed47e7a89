"""Keys: format, proof, rotation, revocation; nothing secret is stored."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select

from registry import audit
from registry.accounts import api_keys, tenants
from registry.accounts.api_keys import (
    KeyChanges,
    KeyRecord,
    generate_plaintext,
    public_id_of,
    verify,
)
from registry.accounts.key_terms import KeyCache, parse_networks
from registry.accounts.quotas import Limits
from registry.audit import current_version
from registry.errors import AlreadyExists, InvalidValue, NotFound
from registry.schema import metadata
from registry.session import reading, writing

NOW = 1_000_000.0


def make_key(engine: Engine, plaintext: str | None = None) -> tuple[KeyRecord, str]:
    with writing(engine, "test") as session:
        if not tenants.list_tenants(session):
            tenants.create_tenant(session, "acme", 2.0, now_at=NOW)
        tenant = tenants.get_tenant(session, "acme")
        return api_keys.create_key(session, tenant.id, "ci", plaintext=plaintext, now_at=NOW)


def stored(engine: Engine, key: str) -> KeyRecord:
    with reading(engine) as session:
        return api_keys.get_key(session, key)


def test_a_key_is_found_by_its_public_id_and_proven_by_its_secret(engine: Engine) -> None:
    record, plaintext = make_key(engine)
    assert plaintext.startswith(f"sk-ph-{record.public_id}-")
    assert public_id_of(plaintext) == record.public_id
    assert verify(record, plaintext, NOW)
    assert not verify(record, plaintext[:-1] + ("A" if plaintext[-1] != "A" else "B"), NOW)
    assert not verify(record, generate_plaintext(record.public_id), NOW)
    assert record == stored(engine, record.public_id)


def test_no_plaintext_reaches_the_disk(engine: Engine, tmp_path: Path) -> None:
    _, plaintext = make_key(engine)
    secret = plaintext.rsplit("-", 1)[1] if "-" not in plaintext[-43:] else plaintext[-43:]
    if engine.dialect.name == "sqlite":
        files = [path.read_bytes() for path in tmp_path.iterdir()]
    else:
        with engine.connect() as connection:
            rows = [connection.execute(select(table)).all() for table in metadata.tables.values()]
        files = [repr(rows).encode()]
    assert files
    assert not any(secret.encode() in content for content in files)


@settings(deadline=None)
@given(st.data())
def test_our_format_is_recognised_and_nothing_else(data: st.DataObject) -> None:
    plaintext = generate_plaintext()
    assert len(plaintext) == len("sk-ph-") + 16 + 1 + 43
    assert public_id_of(plaintext) == plaintext[6:22]
    position = data.draw(st.integers(0, 22))
    changed = data.draw(st.characters(codec="ascii").filter(lambda c: c != plaintext[position]))
    other = plaintext[:position] + changed + plaintext[position + 1 :]
    assert public_id_of(other) != plaintext[6:22]


@settings(deadline=None)
@given(st.text(min_size=1, max_size=600))
def test_any_text_has_a_public_id(text: str) -> None:
    assert len(public_id_of(text)) == 16
    assert public_id_of(text) == public_id_of(text)


@settings(deadline=None)
@given(st.text(max_size=100), st.text(max_size=100))
def test_two_texts_have_two_public_ids(one: str, other: str) -> None:
    assert (public_id_of(one) == public_id_of(other)) == (one == other)


def test_header_bytes_that_are_no_text_are_just_wrong(engine: Engine) -> None:
    record, _ = make_key(engine)
    strange = b"sk-\xff\xfe".decode("utf-8", "surrogateescape")
    assert len(public_id_of(strange)) == 16
    assert not verify(record, strange, NOW)


def test_a_given_text_is_a_key(engine: Engine) -> None:
    record, plaintext = make_key(engine, "my-own-demo-key")
    assert plaintext == "my-own-demo-key"
    assert record.public_id == public_id_of("my-own-demo-key")
    assert verify(record, "my-own-demo-key", NOW)
    assert not verify(record, "my-own-demo-kez", NOW)
    with pytest.raises(AlreadyExists):
        make_key(engine, "my-own-demo-key")


@pytest.mark.parametrize(
    "text", ["", "two words", "tab\t", "n\N{LATIN SMALL LETTER E WITH ACUTE}", "x" * 513]
)
def test_a_text_that_fits_no_header_is_refused(engine: Engine, text: str) -> None:
    with pytest.raises(InvalidValue):
        make_key(engine, text)


def test_rotation_keeps_the_old_secret_for_the_grace(engine: Engine) -> None:
    record, old = make_key(engine, "given-text")
    with writing(engine, "test") as session:
        rotated, new = api_keys.rotate(session, record.id, 60.0, now_at=NOW)
    assert rotated.id == record.id
    assert public_id_of(new) == public_id_of(old) == rotated.public_id
    assert verify(rotated, new, NOW)
    assert verify(rotated, old, NOW + 59.9)
    assert not verify(rotated, old, NOW + 60.0)
    with writing(engine, "test") as session:
        again, newest = api_keys.rotate(session, record.id, now_at=NOW)
    assert verify(again, newest, NOW)
    assert not verify(again, new, NOW)
    assert not verify(again, old, NOW)


def test_revoked_expired_and_disabled_keys_are_refused(engine: Engine) -> None:
    record, plaintext = make_key(engine)
    with writing(engine, "test") as session:
        tenant = tenants.get_tenant(session, "acme")
        brief, brief_text = api_keys.create_key(
            session, tenant.id, "brief", expires_at=NOW + 10, now_at=NOW
        )
    assert verify(brief, brief_text, NOW + 9.9)
    assert not verify(brief, brief_text, NOW + 10)
    with writing(engine, "test") as session:
        revoked = api_keys.revoke(session, record.public_id, now_at=NOW + 1)
        assert api_keys.revoke(session, record.id, now_at=NOW + 2) == revoked
    assert not verify(revoked, plaintext, NOW)
    with reading(engine) as session:
        assert [key.name for key in api_keys.active_keys(session)] == ["brief"]
    with pytest.raises(InvalidValue, match="revoked"), writing(engine, "test") as session:
        api_keys.rotate(session, record.id, now_at=NOW)
    with writing(engine, "test") as session:
        tenants.update_tenant(session, "acme", disabled=True, now_at=NOW)
        assert api_keys.active_keys(session) == []
    assert not verify(stored(engine, brief.id), brief_text, NOW)


def test_a_key_carries_what_the_gateway_needs(engine: Engine) -> None:
    make_key(engine)
    with writing(engine, "test") as session:
        tenant = tenants.get_tenant(session, "acme")
        record, _ = api_keys.create_key(
            session,
            tenant.id,
            "full",
            limits=Limits(1, 2, 3),
            cache=KeyCache("semantic", 60.0, 0.02, True),
            allowed_models=["b", "a", "b"],
            allowed_cidrs=["10.0.0.0/8", "192.0.2.7"],
            now_at=NOW,
        )
    assert record.tenant_weight == 2.0
    assert record.limits == Limits(1, 2, 3)
    assert record.allowed_models == frozenset({"a", "b"})
    assert record.scopes == {"inference"}
    assert record.cache == KeyCache("semantic", 60.0, 0.02, True)
    assert record.allowed_networks == parse_networks(["10.0.0.0/8", "192.0.2.7/32"])
    assert stored(engine, record.id) == record


def test_a_keys_bounds_are_changed_and_lifted(engine: Engine) -> None:
    record, plaintext = make_key(engine)
    bounds = KeyChanges(NOW + 5, ["a"], ["10.0.0.0/8"], KeyCache("exact", sampled=True))
    with writing(engine, "test") as session:
        bound = api_keys.change(session, record.id, bounds, now_at=NOW)
        [entry, *_] = audit.latest(session)
        version = current_version(session)
        assert api_keys.change(session, record.id, bounds, now_at=NOW) == bound
        assert current_version(session) == version  # nothing changed: nobody has to read anew
    assert entry.action == "key.change"
    assert (bound.expires_at, bound.allowed_models) == (NOW + 5, frozenset({"a"}))
    assert bound.allowed_networks == parse_networks(["10.0.0.0/8"])
    assert verify(bound, plaintext, NOW)
    with writing(engine, "test") as session:
        some = api_keys.change(session, record.id, KeyChanges(expires_at=None), now_at=NOW)
        assert some == replace(bound, expires_at=None)
        lifted = KeyChanges(allowed_models=None, allowed_cidrs=None, cache=KeyCache())
        assert api_keys.change(session, record.id, lifted, now_at=NOW) == record
        with pytest.raises(InvalidValue, match="future"):
            api_keys.change(session, record.id, KeyChanges(expires_at=NOW), now_at=NOW)
        api_keys.revoke(session, record.id, now_at=NOW)
        with pytest.raises(InvalidValue, match="revoked"):
            api_keys.change(session, record.id, lifted, now_at=NOW)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache": KeyCache("near")},
        {"cache": KeyCache(max_age_s=-1.0)},
        {"cache": KeyCache(false_hit_budget=1.0)},
        {"expires_at": NOW},
        {"expires_at": float("nan")},
        {"expires_at": float("inf")},
        {"limits": Limits(requests_per_minute=-1)},
        {"name": ""},
        {"allowed_cidrs": ["10.0.0.1/8"]},
        {"allowed_cidrs": []},
        {"name": "line\nbreak"},
    ],
)
def test_wrong_values_are_refused(engine: Engine, wrong: dict[str, object]) -> None:
    record, _ = make_key(engine)
    arguments = {"name": "x", **wrong}
    with pytest.raises(InvalidValue), writing(engine, "test") as session:
        api_keys.create_key(session, record.tenant_id, now_at=NOW, **arguments)  # type: ignore[arg-type]


def test_unknown_keys_and_tenants(engine: Engine) -> None:
    make_key(engine)
    with reading(engine) as session, pytest.raises(NotFound):
        api_keys.get_key(session, "key_none")
    with pytest.raises(NotFound), writing(engine, "test") as session:
        api_keys.create_key(session, "ten_none", "x", now_at=NOW)


def test_the_audit_log_holds_no_digest(engine: Engine) -> None:
    record, plaintext = make_key(engine)
    with writing(engine, "test") as session:
        api_keys.rotate(session, record.id, now_at=NOW)
    with reading(engine) as session:
        entries = [asdict(entry) for entry in audit.latest(session)]
    assert [entry["action"] for entry in entries] == ["key.rotate", "key.create", "tenant.create"]
    for entry in entries:
        assert not {"salt", "digest"} & set(entry["after"])
        assert plaintext not in str(entry)
