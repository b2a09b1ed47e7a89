"""Tenants, keys and their limits through their pages: what is done, and who may not do it."""

import asyncio
import re
import time
from collections.abc import Callable

import pytest

from engine.protocol import ModelStatus
from gateway.policy.rate_limit import Draw
from registry import api_keys, audit, quotas, tenants
from registry.quotas import Limits
from tests.admin.site import Site, Visitor, worker_status

HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture(scope="module", autouse=True)
def _people(site: Site) -> None:
    site.add_model("tiny")
    site.kit.dispatcher.statuses = [worker_status(ModelStatus("tiny", "cold", 0, 0, 0, 0, 0.2))]
    with site.control.writing() as session:
        for name in ("acme", "other"):
            now_at = site.control.clock()
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            api_keys.create_key(session, tenant.id, f"key of {name}", now_at=now_at)
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "vera", "tom")}


def tenant_id(site: Site, name: str) -> str:
    with site.control.reading() as session:
        return tenants.get_tenant(session, name).id


def key_id(site: Site, tenant: str) -> str:
    with site.control.reading() as session:
        return api_keys.list_keys(session, tenants.get_tenant(session, tenant).id)[0].id


def test_a_tenant_is_made_changed_shut_out_and_let_in(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann = visitors["ann"]
    assert "A tenant" not in ann.get("/tenants").text
    made = ann.post("/tenant/add", {"name": "newcomer", "weight": "2.5"})
    assert "The tenant is there" in made.text
    at = tenant_id(site, "newcomer")
    assert made.url.endswith(f"/tenants/{at}")
    again = ann.post("/tenant/add", {"name": "newcomer", "weight": "1"})
    assert again.status == 422
    assert "exists already" in again.text
    for wrong in ("0", "-1", "x", "1e9", "99999"):
        assert ann.post("/tenant/add", {"name": "wrong", "weight": wrong}).status == 422, wrong
    fields = {"weight": "4", "priority": "batch", "reserved": "12.5"}
    assert "Changed" in ann.post(f"/tenant/change/{at}", fields).text
    with site.control.reading() as session:
        found = tenants.get_tenant(session, at)
    assert (found.weight, found.priority, found.reserved_share) == (4.0, "batch", 0.125)
    refused = ann.post(f"/tenant/change/{at}", {**fields, "reserved": "80"})
    assert refused.status == 422
    assert "reserved share must be" in refused.text
    assert "refused within a second" in ann.get(f"/tenant/shut-out/{at}").text
    assert "is shut out" in ann.post(f"/tenant/state/{at}", {"disabled": "1"}).text
    assert "newcomer" in ann.get("/tenants?state=out").text
    assert "is let in again" in ann.post(f"/tenant/state/{at}", {"disabled": ""}).text


def test_limits_are_set_as_they_stand_and_shown_with_what_binds(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, tenant, key = visitors["ann"], tenant_id(site, "acme"), key_id(site, "acme")
    given = {"requests_per_minute": "1,200", "tokens_per_day": "5000", "month_budget_nanos": "0.5"}
    assert "limits are changed" in ann.post(f"/tenant/limits/{tenant}", given).text
    with site.control.reading() as session:
        found = quotas.get_limits(session, "tenant", tenant)
    assert found == Limits(
        requests_per_minute=1200, tokens_per_day=5000, month_budget_nanos=500_000_000
    )
    page = ann.get(f"/keys/{key}").text
    assert "Now: 1,200, by the tenant" in page
    assert "0 of 1,200" in page
    assert ann.post(f"/key/limits/{key}", {"requests_per_minute": "9999"}).status == 200
    assert "Now: 1,200, by the tenant" in ann.get(f"/keys/{key}").text
    assert ann.post(f"/key/limits/{key}", {"requests_per_minute": "7"}).status == 200
    assert "Now: 1,200, by the tenant" not in ann.get(f"/keys/{key}").text
    for wrong in ({"tokens_per_minute": "-1"}, {"day_budget_nanos": "0.0000000001"},
                  {"requests_per_day": "many"}, {"month_budget_nanos": "1e3"}):  # fmt: skip
        answer = ann.post(f"/tenant/limits/{tenant}", wrong)
        assert answer.status == 422, wrong
        assert next(iter(wrong.values())) in answer.text, "what was typed stays"
    with site.control.reading() as session:
        assert quotas.get_limits(session, "tenant", tenant) == found


def test_the_page_says_what_is_used_and_when_limits_have_arrived(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, key = visitors["ann"], key_id(site, "other")
    ann.post(f"/key/limits/{key}", {"requests_per_minute": "4", "max_concurrency": "2"})
    assert "on its way to the gateways" in ann.get(f"/keys/{key}").text
    with site.control.reading() as session:
        record = api_keys.get_key(session, key)
    services = site.kit.edge.services
    services.directory.update(services.directory.version, [record], [])
    assert "in force" in ann.get(f"/keys/{key}").text
    draw = Draw(f"key {key} requests 60", "requests", 60, 4, 4)
    asyncio.run(services.limit_store.reserve("r1", [draw], time.monotonic()))
    page = ann.get(f"/keys/{key}").text
    assert "4 of 4" in page
    assert "0 of 2" in page


def test_a_key_is_made_once_seen_changed_rotated_and_revoked(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, now_at = visitors["ann"], site.control.clock()
    fields = {
        "name": "laptop", "tenant": "other", "inference": "1", "cache": "exact",
        "models": "tiny, large", "networks": "192.0.2.0/24\n2001:db8::1", "expires": "2150-01-01",
        "cache_age": "60",
    }  # fmt: skip
    made = ann.post("/key/add", fields)
    (plaintext,) = set(re.findall(r"sk-ph-[a-z2-7]{16}-[\w-]{43}", made.text))
    assert f'data-copy="{plaintext}"' in made.text
    with site.control.reading() as session:
        key = api_keys.get_key(session, api_keys.public_id_of(plaintext))
    assert key.allowed_models == {"tiny", "large"}
    assert (key.cache.mode, key.cache.max_age_s) == ("exact", 60.0)
    assert [str(one) for one in key.allowed_networks or ()] == ["192.0.2.0/24", "2001:db8::1/128"]
    assert key.expires_at is not None
    at = f"/keys/{key.id}"
    assert plaintext not in ann.get(at).text
    assert "192.0.2.0/24" in ann.get(at).text
    changed = ann.post(f"/key/change/{key.id}", {"cache": "off", "models": "tiny"})
    assert "The key is changed" in changed.text
    with site.control.reading() as session:
        key = api_keys.get_key(session, key.id)
    assert (key.allowed_models, key.allowed_networks, key.expires_at) == ({"tiny"}, None, None)
    rotated = ann.post(f"/key/rotate/{key.id}", {"grace": "3600"})
    (second,) = set(re.findall(r"sk-ph-[a-z2-7]{16}-[\w-]{43}", rotated.text))
    assert second != plaintext
    with site.control.reading() as session:
        key = api_keys.get_key(session, key.id)
    assert api_keys.verify(key, second, now_at + 10)
    assert api_keys.verify(key, plaintext, now_at + 10)
    assert "rotating" in ann.get(at).text
    assert "for ever" in ann.get(f"/key/revoke/{key.id}").text
    assert "is revoked" in ann.post(f"/key/revoke/{key.id}", {}).text
    assert "Rotate" not in ann.get(at).text
    assert ann.post(f"/key/rotate/{key.id}", {"grace": "0"}).status == 422


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": "nobody"},
        {"name": ""},
        {"networks": "everywhere"},
        {"expires": "1999-01-01"},
        {"expires": "tomorrow"},
        {"cache": "semantic"},
        {"cache_age": "-1"},
        {"inference": ""},
    ],
    ids=lambda wrong: "-".join(map("".join, wrong.items())),
)
def test_a_key_that_cannot_be_is_not_made(
    site: Site, visitors: dict[str, Visitor], wrong: dict[str, str]
) -> None:
    fields = {"name": "x", "tenant": "acme", "inference": "1", "cache": "off"} | wrong
    with site.control.reading() as session:
        before = audit.latest(session, 1)
    answer = visitors["ann"].post("/key/add", fields)
    assert answer.status == 422, answer.text
    with site.control.reading() as session:
        assert audit.latest(session, 1) == before


CHANGES: tuple[tuple[str, Callable[[Site], str], dict[str, str]], ...] = (
    ("add tenant", lambda site: "/tenant/add", {"name": "x", "weight": "1"}),
    ("change tenant", lambda site: f"/tenant/change/{tenant_id(site, 'other')}",
     {"weight": "9", "priority": "batch"}),
    ("shut out", lambda site: f"/tenant/state/{tenant_id(site, 'other')}", {"disabled": "1"}),
    ("tenant's limits", lambda site: f"/tenant/limits/{tenant_id(site, 'other')}",
     {"tokens_per_day": "1"}),
    ("key's limits", lambda site: f"/key/limits/{key_id(site, 'other')}", {"tokens_per_day": "1"}),
    ("add key", lambda site: "/key/add", {"name": "x", "tenant": "other", "inference": "1",
                                          "cache": "off"}),
    ("change key", lambda site: f"/key/change/{key_id(site, 'other')}", {"cache": "off"}),
    ("rotate", lambda site: f"/key/rotate/{key_id(site, 'other')}", {"grace": "0"}),
    ("revoke", lambda site: f"/key/revoke/{key_id(site, 'other')}", {}),
)  # fmt: skip


@pytest.mark.parametrize("who", ["vera", "tom"])
@pytest.mark.parametrize(
    ("at", "fields"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES]
)
def test_who_may_not_change_it_is_refused(
    site: Site,
    visitors: dict[str, Visitor],
    who: str,
    at: Callable[[Site], str],
    fields: dict[str, str],
) -> None:
    with site.control.reading() as session:
        before = audit.latest(session, 1)
    answer = visitors[who].post(at(site), fields)
    assert answer.status == 403, answer.text
    assert "may not do this" in answer.text
    forged = visitors["ann"].post(at(site), fields, csrf="00" * 64)
    assert forged.status == 403
    with site.control.reading() as session:
        assert audit.latest(session, 1) == before


def test_a_tenants_owner_has_its_keys_alone_and_sets_no_limits(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    tom, acme, other = visitors["tom"], tenant_id(site, "acme"), tenant_id(site, "other")
    assert "other" not in tom.get("/tenants").text
    assert "key of other" not in tom.get("/keys").text
    for path in (f"/tenants/{other}", f"/keys/{key_id(site, 'other')}", f"/keys?tenant={other}"):
        assert tom.get(path).status == 403, path
    assert tom.get(f"/live/tenant/{other}").status == 401
    page = tom.get(f"/tenants/{acme}").text
    assert "New key" in page
    for offer in ("Set limits", "Shut out", "Share of the service"):
        assert offer not in page
    assert tom.post(f"/tenant/limits/{acme}", {"tokens_per_day": "1"}).status == 403
    assert tom.post(f"/tenant/change/{acme}", {"weight": "9", "priority": "batch"}).status == 403
    fields = {"name": "tom's own", "tenant": "acme", "inference": "1", "cache": "off"}
    assert "shown this once" in tom.post("/key/add", fields).text


def test_a_viewer_sees_and_is_offered_nothing(site: Site, visitors: dict[str, Visitor]) -> None:
    vera = visitors["vera"]
    for path in ("/tenants", "/keys", f"/tenants/{tenant_id(site, 'acme')}"):
        assert vera.get(path).status == 200
        for offer in ("Add a tenant", "New key", "Set limits", "Shut out"):
            assert offer not in vera.get(path).text, path
    assert vera.get("/tenant/add").status == 403
    assert vera.get("/key/add").status == 403
    assert vera.get(f"/key/rotate/{key_id(site, 'acme')}").status == 403


def test_names_are_text_and_odd_addresses_do_no_harm(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann = visitors["ann"]
    made = ann.post("/tenant/add", {"name": HOSTILE, "weight": "1"})
    at = tenant_id(site, HOSTILE)
    key = ann.post("/key/add", {"name": HOSTILE, "tenant": at, "inference": "1", "cache": "off"})
    pages = [made, key] + [
        ann.get(path)
        for path in (
            "/tenants",
            "/keys",
            f"/tenants/{at}",
            f"/keys/{key_id(site, HOSTILE)}",
            f"/tenant/shut-out/{at}",
            f"/keys?tenant={at}",
            "/key/add",
        )
    ]
    for page in pages:
        assert page.status == 200
        assert "<script>alert" not in page.text, page.url
    for query in ("sort=-cost&after=WzEsMl0", "before=WyJ4IiwieSJd", "q=%25&state=x", "sort=zz"):
        assert ann.get(f"/tenants?{query}").status == 200
        assert ann.get(f"/keys?{query}").status == 200
    for path in ("/tenants/ten_none", "/keys/key_none", "/keys?tenant=none", "/key/revoke/none"):
        assert ann.get(path).status == 404, path
    assert f'href="/admin/tenants/{at}"' not in ann.get("/tenants?q=nothing-like-it").text
    found = ann.get("/search.json?q=acme").text
    assert f"/admin/tenants/{tenant_id(site, 'acme')}" in found
