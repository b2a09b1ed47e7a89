"""Ways through the pages: the palette, links between things, and where users of a tenant land."""

import re

import msgspec
import pytest

from admin.operations import keys, prices
from admin.web.forms import day_text
from registry.money.prices import PriceRecord
from tests.admin.ledger_kit import Owner, add_owners, post
from tests.admin.site import Site, Visitor


@pytest.fixture(scope="module")
def owner(site: Site) -> Owner:
    """Of the tenant `acme`, which has a discount, beside another."""
    for name in ("tiny", "second", "third"):
        site.add_model(name)
    found, other = add_owners(site.operator, "acme", "other")
    at = site.operator.clock() - 62 * 86_400.0
    facts = {"cost_nanos": 10**9, "posted_at": at}
    rows = [each.posting(f"r-{each.key.id}", **facts) for each in (found, other)]
    post(site.operator, rows, 2)
    return found


@pytest.fixture(scope="module")
def visitors(site: Site, owner: Owner) -> dict[str, Visitor]:
    site.add_user("tom", "admin", "acme")
    site.add_user("vera", "viewer")
    return {name: site.visitor(name) for name in ("ann", "tom", "vera")}


def found(who: Visitor, text: str) -> set[tuple[str, str, str]]:
    rows = msgspec.json.decode(who.get(f"/search.json?q={text}").body)
    return {(row["kind"], row["title"], row["url"].removeprefix("/admin")) for row in rows}


def test_users_invoices_settings_and_actions_are_found(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, tom = visitors["ann"], visitors["tom"]
    ann.post("/invoice/issue-all", {"month": day_text(site.operator.clock() - 62 * 86_400.0)[:7]})
    assert ("User", "vera", "/users/vera") in found(ann, "ver")
    assert ("Invoice", "INV-000001", "/invoices?q=INV-000001") in found(ann, "inv-0")
    setting = "key_cache_poll_s"
    assert ("Setting", setting, f"/settings?q={setting}") in found(ann, "cache_poll")
    assert ("Action", "Register a model", "/register") in found(ann, "regis")
    assert ("Action", "Switch theme", "#theme") in found(ann, "theme")
    assert {kind for kind, *_ in found(tom, "r")} <= {"Page", "Action", "Tenant", "Key", "Invoice"}
    assert ("Action", "New key", "/key/add") in found(tom, "new%20k")
    assert not found(tom, "regis")
    mine = {title for kind, title, _ in found(tom, "inv-") if kind == "Invoice"}
    theirs = {title for kind, title, _ in found(ann, "inv-") if kind == "Invoice"}
    assert len(mine) == 1 < len(theirs)


def test_a_user_of_one_tenant_lands_there_and_sees_what_its_keys_can_ask(
    site: Site, visitors: dict[str, Visitor], owner: Owner
) -> None:
    context, tom = site.operator, visitors["tom"]
    prices.set_price(context, PriceRecord("tiny", 0.0, 1000, 100, 4000))
    assert tom.get("/").url.endswith(f"/tenants/{owner.tenant.id}")
    at = f"/tenants/{owner.tenant.id}/models"
    assert f'href="/admin{at}"' in tom.get("/").text
    assert models_on(tom.get(at).text) == ["second", "third", "tiny"]
    keys.revoke_key(context, owner.key.id)
    assert models_on(tom.get(at).text) == []
    keys.create_key(context, "acme", "narrow", allowed_models=["tiny"])
    assert models_on(tom.get(at).text) == ["tiny"]
    assert tom.get(at.replace(owner.tenant.id, "other")).status == 403


def models_on(page: str) -> list[str]:
    return re.findall(r'<td data-label="Model"><a href="/admin/prices/(\w+)"', page)


def test_things_lead_to_each_other(visitors: dict[str, Visitor], owner: Owner) -> None:
    ann, tenant, key = visitors["ann"], owner.tenant.id, owner.key
    ways = {
        "/models/tiny": ["/usage?model=tiny", "/prices/tiny", "/limits/model/tiny",
                         "/audit?target=tiny", "/decisions?q=tiny"],
        "/prices/tiny": ["/models/tiny", "/usage?model=tiny"],
        f"/tenants/{tenant}": [f"/usage?tenant={tenant}", f"/invoices?tenant={tenant}",
                               f"/audit?target={tenant}", f"/tenants/{tenant}/models"],
        f"/keys/{key.id}": [f"/usage?key={key.id}", f"/playground?key={key.public_id}",
                            f"/audit?target={key.id}", f"/tenants/{tenant}"],
    }  # fmt: skip
    for page, targets in ways.items():
        text = ann.get(page).text
        missing = [each for each in targets if f'href="/admin{each}' not in text]
        assert missing == [], page
        assert all(ann.get(each).status == 200 for each in targets if "playground" not in each)
    copied = re.findall(r'data-copy="([^"]+)"', ann.get(f"/keys/{key.id}").text)
    assert {key.id, key.public_id} <= set(copied)
    assert key.public_id in ann.get(f"/playground?key={key.public_id}").text
