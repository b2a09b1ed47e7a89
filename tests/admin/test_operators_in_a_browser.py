"""Operators as a browser sees them: in by a provider on another site, two at one form."""

from collections.abc import Iterator

import pytest

from admin.operations import users
from registry.accounts import tenants
from tests.admin.browser import Browser, Visit
from tests.admin.provider import Provider, running_provider, running_site_of
from tests.admin.site import PASSWORD, Site

ELSEWHERE = ("request elsewhere: http://localhost", "Failed to load resource")
"""To a browser `localhost` is another site than 127.0.0.1, where ours is."""


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with running_provider("localhost") as running:
        yield running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with running_site_of(folder, provider, oidc_sign_out=True) as running:
        running.add_user("bob", "admin")
        users.bind(running.operator, "ann", "subject-1")
        running.write(tenants.create_tenant, "acme", now_at=running.operator.clock())
        yield running


def tenant_path(site: Site) -> str:
    return f"/tenants/{site.read(tenants.get_tenant, 'acme').id}"


@pytest.mark.parametrize("scripts", [True, False])
def test_in_by_the_provider_and_out(site: Site, browser: Browser, scripts: bool) -> None:
    with browser.open(site.url, scripts=scripts) as visit:
        visit.expected = ELSEWHERE
        page = visit.page
        visit.go(tenant_path(site))
        page.wait_for_selector("h1 >> text=Sign in")
        if scripts:
            visit.check_accessible()
            visit.shoot("sign-in-by-provider")
        page.click("text=Sign in with Acme")
        page.wait_for_selector("h1 >> text=acme", timeout=15_000)
        assert page.url.endswith(tenant_path(site)), "the strict cookie came along"
        page.click(".side [aria-label='Sign out']")
        page.wait_for_selector("text=You are signed out of Polyhost")
        if scripts:
            visit.check_accessible()
            visit.check_clean()
        page.click("text=Sign out of Acme too")
        page.wait_for_url("http://localhost:*/end?*")
        visit.go(tenant_path(site))
        page.wait_for_selector("h1 >> text=Sign in")


def test_who_is_refused_is_told_why(site: Site, browser: Browser, provider: Provider) -> None:
    provider.subject = "nobody-we-know"
    with browser.open(site.url) as visit:
        visit.expected = ELSEWHERE
        visit.go("/sign-in")
        visit.page.click("text=Sign in with Acme")
        visit.page.wait_for_selector("text=polyhost users bind NAME nobody-we-know")
        visit.check_accessible()
        visit.shoot("sign-in-refused")
        visit.check_clean()
    provider.subject = "subject-1"


def test_two_at_one_form(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as ann, browser.open(site.url) as bob:
        for visit, name in ((ann, "ann"), (bob, "bob")):
            visit.expected = ("409",)
            visit.sign_in(name, PASSWORD)
            visit.go(tenant_path(site))
        change(bob, "7", "batch")
        bob.page.wait_for_selector("text=The change applies to the next requests")
        change(ann, "9", "standard")
        ann.page.wait_for_selector("text=admin:bob set 7 in the meantime")
        assert ann.page.input_value("#f-weight") == "9"
        assert ann.page.input_value("#f-priority") == "batch", "what she left alone is what holds"
        ann.check_accessible()
        ann.shoot("tenant-changed-meanwhile")
        ann.page.click("section:has(#f-weight) button")
        ann.page.wait_for_selector("text=The change applies to the next requests")
        ann.check_clean()
    found = site.read(tenants.get_tenant, "acme")
    assert (found.weight, found.priority) == (9.0, "batch")


def change(visit: Visit, weight: str, priority: str) -> None:
    visit.page.fill("#f-weight", weight)
    visit.page.select_option("#f-priority", priority)
    visit.page.click("section:has(#f-weight) button")


def test_binding_by_its_page(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/users/bob")
        page.fill("#f-subject", "subject-of-bob")
        page.click("text=Bind >> visible=true")
        page.wait_for_selector("code >> text=subject-of-bob")
        visit.check_accessible()
        visit.shoot("user-bound")
        page.click("text=Unbind")
        page.wait_for_selector("text=Not bound to an account at Acme")
        visit.check_clean()
