"""Tenants, keys and their limits through their pages: what is done, and who may not do it."""

import asyncio
import re
import time
from collections.abc import Callable

import pytest

from engine.protocol import ModelStatus
from gateway.limits.policy.rate_limit import Draw
from registry import audit
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.quotas import Limits
from tests.admin.site import Site, Visitor, worker_status

HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture(scope="module", autouse=True)
def _people(site: Site) -> None:
    site.add_model("tiny")
    site.kit.dispatcher.statuses = [worker_status(ModelStatus("tiny", "cold", 0, 0, 0, 0, 0.2))]
    with site.operator.writing() as session:
        for name in ("acme", "other"):
            now_at = site.operator.clock()
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            api_keys.create_key(session, tenant.id, f"key of {name}", now_at=now_at)
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "vera", "tom")}


def tenant_id(site: Site, name: str) -> str:
    return site.read(tenants.get_tenant, name).id


def key_id(site: Site, tenant: str) -> str:
    with site.operator.reading() as session:
        return api_keys.list_keys(session, tenants.get_tenant(session, tenant).id)[0].id


def test_a_tenant_is_made_changed_shut_out_and_let_in(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann = visitors["ann"]
    made = ann.post("/tenant/add", {"name": "newcomer", "weight": "2.5"})
    assert "The tenant was created" in made.text
    at = tenant_id(site, "newcomer")
    assert made.url.endswith(f"/tenants/{at}")
    again = ann.post("/tenant/add", {"name": "newcomer", "weight": "1"})
    assert again.status == 422
    assert "already exists" in again.text
    for wrong in ("0", "-1", "x", "1e9", "99999"):
        assert ann.post("/tenant/add", {"name": "wrong", "weight": wrong}).status == 422, wrong
    fields = {"weight": "4", "priority": "batch", "reserved": "12.5", "retention": "7"}
    assert "Saved" in ann.post(f"/tenant/change/{at}", fields).text
    found = site.read(tenants.get_tenant, at)
    assert (found.weight, found.priority, found.reserved_share) == (4.0, "batch", 0.125)
    assert found.response_retention_days == 7
    assert 'value="7"' in ann.get(f"/tenants/{at}").text
    assert "Saved" in ann.post(f"/tenant/change/{at}", {**fields, "retention": ""}).text
    assert site.read(tenants.get_tenant, at).response_retention_days is None
    refused = ann.post(f"/tenant/change/{at}", {**fields, "retention": "9999"})
    assert "response retention must be" in refused.text
    refused = ann.post(f"/tenant/change/{at}", {**fields, "reserved": "80"})
    assert refused.status == 422
    assert "reserved share must be" in refused.text
    assert "working within a second" in ann.get(f"/tenant/shut-out/{at}").text
    assert "was disabled" in ann.post(f"/tenant/state/{at}", {"disabled": "1"}).text
    assert "newcomer" in ann.get("/tenants?state=out").text
    assert "was enabled" in ann.post(f"/tenant/state/{at}", {"disabled": ""}).text


def test_limits_are_set_as_they_stand_and_shown_with_what_binds(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, tenant, key = visitors["ann"], tenant_id(site, "acme"), key_id(site, "acme")
    given = {"requests_per_minute": "1,200", "tokens_per_day": "5000", "month_budget_nanos": "0.5"}
    assert "limits were changed" in ann.post(f"/tenant/limits/{tenant}", given).text
    found = site.read(quotas.get_limits, "tenant", tenant)
    assert found == Limits(
        requests_per_minute=1200, tokens_per_day=5000, month_budget_nanos=500_000_000
    )
    page = ann.get(f"/keys/{key}").text
    assert "Now: 1,200, set for the tenant" in page
    assert "0 of 1,200" in page
    assert ann.post(f"/key/limits/{key}", {"requests_per_minute": "9999"}).status == 200
    assert "Now: 1,200, set for the tenant" in ann.get(f"/keys/{key}").text
    assert ann.post(f"/key/limits/{key}", {"requests_per_minute": "7"}).status == 200
    assert "Now: 1,200, set for the tenant" not in ann.get(f"/keys/{key}").text
    for wrong in ({"tokens_per_minute": "-1"}, {"day_budget_nanos": "0.0000000001"},
                  {"requests_per_day": "many"}, {"month_budget_nanos": "1e3"}):  # fmt: skip
        answer = ann.post(f"/tenant/limits/{tenant}", wrong)
        assert answer.status == 422, wrong
        assert next(iter(wrong.values())) in answer.text, "what was typed stays"
    assert site.read(quotas.get_limits, "tenant", tenant) == found


def test_the_page_says_what_is_used_and_when_limits_have_arrived(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, key = visitors["ann"], key_id(site, "other")
    ann.post(f"/key/limits/{key}", {"requests_per_minute": "4", "max_concurrency": "2"})
    assert "taking effect" in ann.get(f"/keys/{key}").text
    record = site.read(api_keys.get_key, key)
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
    ann, now_at = visitors["ann"], site.operator.clock()
    fields = {
        "name": "laptop", "tenant": "other", "inference": "1", "cache": "exact",
        "models": "tiny, large", "networks": "192.0.2.0/24\n2001:db8::1", "expires": "2150-01-01",
        "cache_age": "60",
    }  # fmt: skip
    site.add_model("large")
    wrong = ann.post("/key/add", {**fields, "models": "tiny larg"})
    assert wrong.status == 422
    assert "larg&#39; (did you mean large?)" in wrong.text
    assert re.findall(r'id="f-(\w+)"[^>]* autofocus', wrong.text) == ["models"]
    made = ann.post("/key/add", fields)
    (plaintext,) = set(re.findall(r"sk-ph-[a-z2-7]{16}-[\w-]{43}", made.text))
    assert f'data-copy="{plaintext}"' in made.text
    key = site.read(api_keys.get_key, api_keys.public_id_of(plaintext))
    assert key.allowed_models == frozenset({"tiny", "large"})
    assert (key.cache.mode, key.cache.max_age_s) == ("exact", 60.0)
    assert [str(one) for one in key.allowed_networks or ()] == ["192.0.2.0/24", "2001:db8::1/128"]
    assert key.expires_at is not None
    at = f"/keys/{key.id}"
    assert plaintext not in ann.get(at).text
    assert "192.0.2.0/24" in ann.get(at).text
    wrong = ann.post(f"/key/change/{key.id}", {"cache": "off", "models": "tiny sherlok"})
    assert "sherlok&#39;; register a model first" in wrong.text
    changed = ann.post(f"/key/change/{key.id}", {"cache": "off", "models": "tiny"})
    assert "Saved. The change takes effect" in changed.text
    key = site.read(api_keys.get_key, key.id)
    assert key.allowed_models == frozenset({"tiny"})
    assert key.allowed_networks is None
    assert key.expires_at is None
    rotated = ann.post(f"/key/rotate/{key.id}", {"grace": "3600"})
    (second,) = set(re.findall(r"sk-ph-[a-z2-7]{16}-[\w-]{43}", rotated.text))
    assert second != plaintext
    key = site.read(api_keys.get_key, key.id)
    assert api_keys.verify(key, second, now_at + 10)
    assert api_keys.verify(key, plaintext, now_at + 10)
    assert "rotating" in ann.get(at).text
    assert "cannot be restored" in ann.get(f"/key/revoke/{key.id}").text
    assert "was revoked" in ann.post(f"/key/revoke/{key.id}", {}).text
    assert "Rotate" not in ann.get(at).text
    assert ann.post(f"/key/rotate/{key.id}", {"grace": "0"}).status == 422


def test_a_form_sent_again_makes_no_other_key_and_no_other_secret(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann = visitors["ann"]
    once = hidden(ann.get("/key/add").text, "once")
    assert once != hidden(ann.get("/key/add").text, "once")
    fields = {"name": "twice", "tenant": "other", "inference": "1", "cache": "off", "once": once}
    assert "sk-ph-" in ann.post("/key/add", fields).text
    again = ann.post("/key/add", {**fields, "name": "thrice"})
    assert "This form was sent already" in again.text
    assert "sk-ph-" not in again.text
    with site.operator.reading() as session:
        (key,) = [one for one in api_keys.list_keys(session) if one.name in ("twice", "thrice")]
    assert again.url.endswith(f"/keys/{key.id}")
    mark = hidden(ann.get(f"/key/rotate/{key.id}").text, "instead_of")
    rotate = {"grace": "3600", "instead_of": mark}
    assert "sk-ph-" in ann.post(f"/key/rotate/{key.id}", rotate).text
    rotated = site.read(api_keys.get_key, key.id)
    again = ann.post(f"/key/rotate/{key.id}", rotate)
    assert "was rotated in the meantime" in again.text
    assert site.read(api_keys.get_key, key.id) == rotated


def test_two_who_set_limits_at_once_do_not_undo_each_other(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    site.add_user("bob", "admin")
    ann, bob = visitors["ann"], site.visitor("bob")
    at = tenant_id(site, "other")
    start = {"requests_per_minute": "10", "tokens_per_day": "500"}
    ann.post(f"/tenant/limits/{at}", start)
    seen = hidden(ann.get(f"/tenants/{at}").text, "seen")

    def now() -> tuple[int, ...]:
        found = site.read(quotas.get_limits, "tenant", at)
        return found.requests_per_minute, found.tokens_per_day, found.max_concurrency

    bobs = {**start, "requests_per_minute": "20", "seen": seen}
    assert "limits were changed" in bob.post(f"/tenant/limits/{at}", bobs).text
    other_field = {**start, "max_concurrency": "3", "seen": seen}
    assert "limits were changed" in ann.post(f"/tenant/limits/{at}", other_field).text
    assert now() == (20, 500, 3), "each changed what each touched"
    same_field = {**start, "requests_per_minute": "30", "seen": seen}
    refused = ann.post(f"/tenant/limits/{at}", same_field)
    assert refused.status == 422
    assert "admin:bob set 20 in the meantime" in refused.text
    assert now() == (20, 500, 3)
    shown = {name: value_of(refused.text, name) for name in (*start, "max_concurrency")}
    assert shown == {"requests_per_minute": "30", "tokens_per_day": "500", "max_concurrency": "3"}
    again = {**shown, "seen": hidden(refused.text, "seen")}
    assert "limits were changed" in ann.post(f"/tenant/limits/{at}", again).text
    assert now() == (30, 500, 3)
    for odd in ("requests_per_minute=x", "nothing=1", "a" * 900, "requests_per_minute"):
        assert ann.post(f"/tenant/limits/{at}", {**again, "seen": odd}).status == 200, odd
    for huge in ({"requests_per_day": "9" * 18}, {"month_budget_nanos": "9007199.3"}):
        answer = ann.post(f"/tenant/limits/{at}", {**again, **huge})
        assert answer.status == 422
        assert "At most 9,007,199" in answer.text


def hidden(page: str, name: str) -> str:
    """What a form carries unseen."""
    found: list[str] = re.findall(rf'type="hidden" name="{name}" value="([^"]*)"', page)
    return found[0]


def value_of(page: str, name: str) -> str:
    """What stands in a field."""
    found: list[str] = re.findall(rf'name="{name}" type="text"[^>]* value="([^"]*)"', page)
    return found[0]


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
    before = site.read(audit.latest, 1)
    answer = visitors["ann"].post("/key/add", fields)
    assert answer.status == 422, answer.text
    assert site.read(audit.latest, 1) == before


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
    before = site.read(audit.latest, 1)
    answer = visitors[who].post(at(site), fields)
    assert answer.status == 403, answer.text
    assert "does not have the right" in answer.text
    forged = visitors["ann"].post(at(site), fields, csrf="00" * 64)
    assert forged.status == 403
    assert site.read(audit.latest, 1) == before


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
    for offer in ("Set limits", "Disable", "Share of the service"):
        assert offer not in page
    assert tom.post(f"/tenant/limits/{acme}", {"tokens_per_day": "1"}).status == 403
    assert tom.post(f"/tenant/change/{acme}", {"weight": "9", "priority": "batch"}).status == 403
    fields = {"name": "tom's own", "tenant": "acme", "inference": "1", "cache": "off"}
    assert "shown only once" in tom.post("/key/add", fields).text


def test_a_viewer_sees_and_is_offered_nothing(site: Site, visitors: dict[str, Visitor]) -> None:
    vera = visitors["vera"]
    for path in ("/tenants", "/keys", f"/tenants/{tenant_id(site, 'acme')}"):
        assert vera.get(path).status == 200
        for offer in ("Add a tenant", "New key", "Set limits", "/tenant/shut-out/"):
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
