"""This month's forecast and budget, invoices page by page, settings: as their pages show them."""

import re

import pytest

from gateway.limits.limits import period_of
from registry.accounts import quotas
from registry.money import invoices
from registry.money.invoices import InvoiceRecord
from registry.paging import Cut
from tests.admin.browser import Browser
from tests.admin.ledger_kit import add_owners, post
from tests.admin.site import PASSWORD, Site, Visitor

NUM_INVOICES = 130
NANOS = 10**9


@pytest.fixture(scope="module", autouse=True)
def _billed(site: Site) -> None:
    """Two tenants with costs this month, one of them with a budget, and many invoices."""
    site.add_model("tiny")
    now_at = site.operator.clock()
    owners = add_owners(site.operator, "acme", "other")
    with site.operator.writing() as session:
        quotas.set_limits(
            *(session, "tenant", owners[0].tenant.id, {"month_budget_nanos": 3 * NANOS}),
            now_at=now_at,
        )
        for number in range(NUM_INVOICES):
            tenant = owners[number % 2].tenant
            began_at = period_of("month", number * 32 * 86_400.0).began_at
            invoices.issue(session, _invoice(number, tenant.id, tenant.name, began_at),
                           now_at=now_at)  # fmt: skip
    rows = [
        owners[number % 2].posting(f"r{number}", cost_nanos=NANOS, posted_at=now_at)
        for number in range(4)
    ]
    post(site.operator, rows)
    site.add_user("tom", "viewer", "acme")
    site.add_user("vera", "viewer")


def _invoice(number: int, tenant_id: str, name: str, began_at: float) -> InvoiceRecord:
    return InvoiceRecord(
        number=f"INV-{number:05}",
        sequence=number,
        tenant_id=tenant_id,
        tenant_name=name,
        began_at=began_at,
        ended_at=began_at + 1,
        after_seq=0,
        through_seq=0,
        currency="USD",
        total_nanos=number * NANOS,
        issued_at=float(number),
        document="{}",
        digest="",
    )


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "vera", "tom")}


def month_url(page: str) -> str:
    """Of the button "This month"."""
    (url,) = re.findall(r'href="/admin(/usage\?[^"]*)"[^>]*>This month', page)
    return str(url).replace("&amp;", "&")


def test_this_month_is_foretold_and_held_against_the_budget(
    visitors: dict[str, Visitor],
) -> None:
    ann = visitors["ann"]
    url = month_url(ann.get("/usage").text)
    page = ann.get(url).text
    assert "Cumulative cost this month" in page
    assert "USD 4.00" in page, "spent so far"
    assert 'class="budget"' not in page
    of_acme = ann.get(url + "&tenant=acme").text
    assert 'class="budget"' in of_acme
    assert "Budget: USD 3.00" in of_acme
    assert "reached on" in of_acme or "not reached" in of_acme
    assert of_acme.count('<td data-label="Kind">') >= 1
    assert 'class="budget"' not in ann.get(url + "&tenant=acme&model=tiny").text
    assert "Cumulative cost this month" not in ann.get("/usage?from=2020-01-01&to=2020-01-31").text
    toms = visitors["tom"].get(url)
    assert toms.status == 200
    assert 'class="budget"' not in toms.text, "the whole server's is not for him"
    assert 'class="budget"' in visitors["tom"].get(url + "&tenant=acme").text
    assert visitors["tom"].get(url + "&tenant=other").status == 403


def numbers(page: str) -> list[str]:
    return re.findall(r"<strong>(INV-\d+)</strong>", page)


def test_invoices_are_paged_and_found(visitors: dict[str, Visitor]) -> None:
    ann, seen = visitors["ann"], list[str]()
    page = ann.get("/invoices").text
    assert "130 issued" in page
    while True:
        seen += numbers(page)
        further = re.findall(r'rel="next" href="/admin([^"]*)"', page)
        if not further:
            break
        page = ann.get(further[0].replace("&amp;", "&")).text
    assert seen == [f"INV-{number:05}" for number in reversed(range(NUM_INVOICES))]
    assert numbers(ann.get("/invoices?sort=number").text)[0] == "INV-00000"
    by_total = numbers(ann.get("/invoices?sort=-total&q=acme").text)
    assert by_total[:2] == ["INV-00128", "INV-00126"]
    assert numbers(ann.get("/invoices?sort=tenant").text)[0] == "INV-00000"
    assert numbers(ann.get("/invoices?q=inv-00017").text) == ["INV-00017"]
    assert len(numbers(ann.get("/invoices?q=acme").text)) == 50
    assert numbers(ann.get("/invoices?q=%25").text) == []
    for odd in ("after=x", "before=WzEsMl0", "sort=-;drop", "after=WyJ4IiwieCJd", "q=%00"):
        assert ann.get(f"/invoices?{odd}").status == 200, odd


def test_a_tenants_user_pages_through_its_own_alone(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    page = visitors["tom"].get("/invoices").text
    assert "65 issued" in page
    assert all(int(number[4:]) % 2 == 0 for number in numbers(page))
    assert numbers(visitors["tom"].get("/invoices?q=other").text) == []
    assert visitors["tom"].get("/invoices?tenant=other").status == 403
    page_of, num = site.read(invoices.page, (), "", Cut())
    assert (page_of.rows, num) == ([], 0)


def test_settings_are_for_who_changes_things(visitors: dict[str, Visitor]) -> None:
    page = visitors["ann"].get("/settings?q=default_max_tokens").text
    assert "Changed settings" in page
    assert "<code>32</code>" in page
    assert "default <code>" in page
    assert "No matching settings" in visitors["ann"].get("/settings?q=nothing-like-it").text
    hostile = visitors["ann"].get("/settings?q=%22%3E%3Cscript%3Ealert(1)").text
    assert "<script>alert" not in hostile
    for name in ("vera", "tom"):
        assert visitors[name].get("/settings").status == 403
        assert "/admin/settings" not in visitors[name].get("/account").text


def test_in_a_browser(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/settings")
        visit.check_accessible()
        visit.shoot("settings")
        visit.go("/usage")
        visit.page.click("text=This month")
        visit.page.fill("[name=tenant]", "acme")
        visit.page.click("text=Show >> visible=true")
        visit.page.wait_for_selector(".chart .budget", state="attached")
        visit.page.click("summary >> text=Show as a table")
        visit.check_accessible()
        visit.shoot("usage-month")
        visit.go("/invoices?q=acme")
        visit.page.click("[rel=next]")
        visit.page.wait_for_selector("[rel=prev]")
        visit.check_accessible()
        visit.shoot("invoices-paged")
        visit.check_clean()
