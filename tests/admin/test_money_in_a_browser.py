"""Tenants, keys, usage and prices as people see and use them, with a browser."""

import re

import pytest

from registry.accounts import api_keys, tenants
from registry.money import prices
from registry.money.prices import PriceRecord
from tests.admin.browser import Browser
from tests.admin.site import PASSWORD, Site


@pytest.fixture(scope="module", autouse=True)
def _filled(site: Site) -> None:
    """A tenant with a key, a model with a price."""
    site.add_model("tiny")
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        tenant = tenants.create_tenant(session, "a tenant with a long name & sons", now_at=now_at)
        api_keys.create_key(session, tenant.id, "first", now_at=now_at)
        prices.set_price(session, PriceRecord("tiny", now_at + 1, 500, 50, 1500), now_at=now_at)


def test_every_page_is_clean_accessible_and_fits(site: Site, browser: Browser) -> None:
    (key,) = site.read(api_keys.list_keys)
    pages = {
        "tenants": "/tenants",
        "tenant": f"/tenants/{key.tenant_id}",
        "tenant-add": "/tenant/add",
        "keys": "/keys",
        "key": f"/keys/{key.id}",
        "key-add": "/key/add",
        "key-rotate": f"/key/rotate/{key.id}",
        "usage": "/usage",
        "invoices": "/invoices",
        "prices": "/prices",
        "price": "/prices/tiny",
    }
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        for name, path in pages.items():
            visit.go(path)
            visit.check_accessible()
            visit.shoot(name)
            visit.check_clean()


def test_a_tenant_a_limit_and_a_key_are_made_by_keyboard(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/tenant/add")
        visit.type_into("#f-name", "by keyboard")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1 >> text=by keyboard")
        page.focus("#f-requests_per_minute")
        page.keyboard.type("3")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The limits were changed.")
        page.wait_for_selector(".use >> text=0 of 3")
        page.click("text=New key")
        assert page.input_value("#f-tenant")
        page.fill("#f-name", "laptop")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=shown only once")
        visit.check_accessible()
        visit.shoot("key-made")
        assert re.fullmatch(r"sk-ph-[a-z2-7]{16}-[\w-]{43}", page.inner_text(".code code"))
        page.click("text=Done")
        page.wait_for_selector("h1 >> text=laptop")
        assert "sk-ph-" not in page.content()
        page.click("text=Revoke")
        page.click("button >> text=Revoke")
        page.wait_for_selector("[data-part=state] >> text=revoked")
        visit.check_clean()
