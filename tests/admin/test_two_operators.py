"""Two operators at one form: nobody undoes what the other did without being shown it."""

import re
import threading
from collections.abc import Iterator

import pytest

from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import keys as key_verbs
from admin.operations import prices as price_verbs
from admin.operations import tenants as tenant_verbs
from admin.operations import users as user_verbs
from registry.accounts import api_keys, tenants, users
from registry.accounts.api_keys import KeyRecord
from registry.accounts.key_terms import KeyChanges
from registry.accounts.tenants import TenantRecord
from registry.money import prices
from registry.money.prices import PriceRecord
from tests.admin.site import Site, Visitor, form_of


@pytest.fixture(scope="module", autouse=True)
def _people(site: Site) -> None:
    for name in ("tiny", "large"):
        site.add_model(name)
    site.add_user("bob", "admin")
    with site.operator.writing() as session:
        for name in ("acme", "own"):
            now_at = site.operator.clock()
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            api_keys.create_key(session, tenant.id, f"key of {name}", now_at=now_at)
    site.add_user("tom", "owner", "own")


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    return site.visitor("ann")


@pytest.fixture(scope="module")
def bob(site: Site) -> Visitor:
    return site.visitor("bob")


def tenant(site: Site, name: str = "acme") -> TenantRecord:
    return site.read(tenants.get_tenant, name)


def key(site: Site, of: str = "acme") -> KeyRecord:
    with site.operator.reading() as session:
        return api_keys.list_keys(session, tenants.get_tenant(session, of).id)[0]


def test_what_others_did_to_a_tenant_stays_and_clashes_are_shown(
    site: Site, ann: Visitor, bob: Visitor
) -> None:
    at = tenant(site).id
    action = f"/tenant/change/{at}"
    tenant_verbs.update_tenant(site.operator, at, weight=1 / 3)
    anns, bobs = (form_of(who.get(f"/tenants/{at}").text, action) for who in (ann, bob))
    assert "Saved" in bob.post(action, {**bobs, "weight": "7", "priority": "batch"}).text
    assert "Saved" in ann.post(action, {**anns, "reserved": "10"}).text
    found = tenant(site)
    assert (found.weight, found.priority, found.reserved_share) == (7.0, "batch", 0.1)
    refused = ann.post(action, {**anns, "weight": "9"})
    assert refused.status == 409
    assert "admin:bob set 7 in the meantime" in refused.text
    assert "Nothing was saved" in refused.text
    assert tenant(site).weight == 7.0
    again = form_of(refused.text, action)
    assert again["weight"] == "9", "what was typed stays"
    assert (again["priority"], again["reserved"]) == ("batch", "10"), "the rest is what holds"
    assert "set by admin:ann in the meantime" in refused.text
    assert "Saved" in ann.post(action, again).text
    found = tenant(site)
    assert (found.weight, found.priority, found.reserved_share) == (9.0, "batch", 0.1)


def test_both_meaning_the_same_is_no_clash(site: Site, ann: Visitor, bob: Visitor) -> None:
    at = tenant(site).id
    action = f"/tenant/change/{at}"
    shown = form_of(ann.get(f"/tenants/{at}").text, action)
    for who in (ann, bob):
        assert "Saved" in who.post(action, {**shown, "weight": "3"}).text
    for odd in ("x", "weight=zz", "=", "weight=" + "0" * 12 + " weight=" + "1" * 12, "\x01"):
        assert ann.post(action, {**shown, "seen": odd}).status in (200, 409), odd


def test_a_keys_bounds(site: Site, ann: Visitor, bob: Visitor) -> None:
    at = key(site).id
    action = f"/key/change/{at}"
    first = form_of(ann.get(f"/keys/{at}").text, action)
    assert "Saved" in bob.post(action, {**first, "networks": "192.0.2.0/24"}).text
    assert "Saved" in ann.post(action, {**first, "models": "tiny\r\nlarge"}).text
    found = key(site)
    assert found.allowed_models == frozenset({"tiny", "large"})
    assert [str(one) for one in found.allowed_networks or ()] == ["192.0.2.0/24"]
    clash = ann.post(action, {**first, "networks": "198.51.100.1", "cache_sampled": "1"})
    assert clash.status == 409
    assert "admin:bob set 192.0.2.0/24 in the meantime" in clash.text
    again = form_of(clash.text, action)
    assert again["networks"] == "198.51.100.1"
    assert set(again["models"].split()) == {"tiny", "large"}
    assert again["cache_sampled"] == "1"
    assert "Saved" in ann.post(action, again).text
    found = key(site)
    assert [str(one) for one in found.allowed_networks or ()] == ["198.51.100.1/32"]
    assert found.cache.sampled
    assert found.allowed_models == frozenset({"tiny", "large"})
    lifted = form_of(ann.get(f"/keys/{at}").text, action)
    assert "Saved" in bob.post(action, {**lifted, "networks": ""}).text
    told = ann.post(action, {**lifted, "networks": "203.0.113.0/24"}).text
    assert "admin:bob set any in the meantime" in told


def test_a_tenants_owner_is_not_told_who_the_operators_are(site: Site, ann: Visitor) -> None:
    tom, at = site.visitor("tom"), key(site, "own").id
    action = f"/key/change/{at}"
    shown = form_of(tom.get(f"/keys/{at}").text, action)
    assert "Saved" in ann.post(action, {**shown, "models": "large"}).text
    refused = tom.post(action, {**shown, "models": "tiny"})
    assert refused.status == 409
    assert "somebody set large in the meantime" in refused.text
    assert "admin:ann" not in refused.text


def dated(site: Site) -> list[int]:
    with site.operator.reading() as session:
        return [price.completion_nanos for price in prices.list_prices(session, "tiny")]


def test_prices(site: Site, ann: Visitor, bob: Visitor) -> None:
    preview, put = "/price/preview/tiny", "/price/set/tiny"
    start = {"prompt_nanos": "1", "completion_nanos": "2", "from": "2150-01-01"}
    anns, bobs = (form_of(who.get("/prices/tiny").text, preview) for who in (ann, bob))
    assert "The price was set" in bob.post(put, {**bobs, **start}).text
    assert dated(site) == [2000]
    mine = {**anns, "completion_nanos": "5", "from": "2150-01-01"}
    for path in (preview, put):
        refused = ann.post(path, mine)
        assert refused.status == 409, path
        assert "were changed in the meantime" in refused.text
    assert dated(site) == [2000]
    again = form_of(refused.text, preview)
    assert (again["completion_nanos"], again["from"]) == ("5", "2150-01-01")
    looked = ann.post(preview, again)
    assert looked.status == 200
    assert "The price was set" in ann.post(put, form_of(looked.text, preview)).text
    assert dated(site) == [5000]


def test_a_price_that_is_in_effect_clashes_by_name(site: Site, ann: Visitor, bob: Visitor) -> None:
    """What others set holds already, so the fields of the two forms clash, not the dates alone."""
    site.add_model("small")
    action, put = "/price/preview/small", "/price/set/small"
    mine = {**form_of(ann.get("/prices/small").text, action), "prompt_nanos": "5"}
    with site.operator.writing() as session:
        price = PriceRecord("small", site.operator.clock(), 7000, 0, 0)
        prices.set_price(session, price, now_at=price.valid_from)
    for path in (action, put):
        refused = ann.post(path, mine)
        assert refused.status == 409, path
        assert "set 7 in the meantime" in refused.text
    assert "The price was set" in bob.post(put, form_of(refused.text, action)).text


def test_roles(site: Site, ann: Visitor) -> None:
    site.add_user("eve", "owner")
    site.add_user("sue", "viewer")
    eve = site.visitor("eve")
    action = "/user/role/sue"

    def seen(who: Visitor) -> str:
        return str(re.findall(r'name="seen" value="(\w+)"', who.get("/users/sue").text)[0])

    anns, eves = seen(ann), seen(eve)
    give = {"tenant": "", "role": "admin", "seen": eves}
    assert "The roles were changed" in eve.post(action, give).text
    refused = ann.post(action, {"tenant": "", "role": "", "seen": anns})
    assert refused.status == 422
    assert "changed these roles in the meantime" in refused.text
    assert site.read(users.get_user, "sue").roles == {"": "admin"}
    assert "changed" in ann.post(action, {"tenant": "", "role": "viewer", "seen": seen(ann)}).text


def test_verbs_refuse_what_was_seen_before(site: Site) -> None:
    context, now = site.operator, tenant(site)
    mark = tenant_verbs.share_mark(now)
    tenant_verbs.update_tenant(context, now.id, weight=now.weight + 1, seen=mark)
    with pytest.raises(ChangedMeanwhile):
        tenant_verbs.update_tenant(context, now.id, weight=1.0, seen=mark)
    assert tenant_verbs.update_tenant(context, "acme", weight=2.0).weight == 2.0, "as the CLI does"
    first = key(site)
    bounds = key_verbs.bounds_mark(first)
    key_verbs.change_key(context, first.id, KeyChanges(allowed_models=["large"]), bounds)
    with pytest.raises(ChangedMeanwhile):
        key_verbs.change_key(context, first.id, KeyChanges(allowed_models=None), bounds)
    with context.reading() as session:
        listed = prices.list_prices(session, "tiny")
    price = PriceRecord("tiny", 0.0, 1, 1, 1)
    seen = price_verbs.prices_mark(reversed(listed))
    price_verbs.set_price(context, price, seen=seen)
    with pytest.raises(ChangedMeanwhile):
        price_verbs.set_price(context, price, seen=seen)
    with context.reading() as session:
        roles = user_verbs.roles_mark(users.get_user(session, "bob"))
    user_verbs.set_role(context, "bob", "viewer", "acme", roles)
    with pytest.raises(ChangedMeanwhile):
        user_verbs.set_role(context, "bob", None, "acme", roles)


def both(first: Iterator[None], second: Iterator[None]) -> None:
    threads = [threading.Thread(target=lambda each=each: list(each)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_forms_sent_at_the_same_moment_both_count(site: Site, ann: Visitor, bob: Visitor) -> None:
    at = tenant(site).id
    action = f"/tenant/change/{at}"
    anns, bobs = (who.get("/account").csrf for who in (ann, bob))
    for turn in range(1, 9):
        shown = form_of(ann.get(f"/tenants/{at}").text, action)
        gate = threading.Barrier(2)
        answers: list[int] = []

        def send(
            who: Visitor,
            csrf: str,
            change: dict[str, str],
            gate: threading.Barrier = gate,
            shown: dict[str, str] = shown,
            answers: list[int] = answers,
        ) -> Iterator[None]:
            gate.wait(30)
            answers.append(who.post(action, {**shown, **change}, csrf).status)
            yield

        weight, reserved = str(10 + turn), str(20 + turn)
        both(send(ann, anns, {"weight": weight}), send(bob, bobs, {"reserved": reserved}))
        assert answers == [200, 200]
        found = tenant(site)
        assert (found.weight, round(100 * found.reserved_share, 6)) == (10 + turn, 20 + turn)
