"""What only the command line could do has pages: alerts, limits of models and of the server, plans,
decisions, invoices of all tenants, corrections, withdrawing a price."""

import re
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import msgspec
import pytest

from admin.alerts import webhook
from admin.operations import invoices, limits, prices
from engine.protocol import ModelStatus
from registry import audit
from registry.accounts import quotas
from registry.money import alerts, corrections, plans
from registry.money.alerts import Alert
from registry.money.corrections import Right
from registry.money.prices import PriceRecord
from tests.admin.fleet_handler import FleetHandler, fleet, telling
from tests.admin.ledger_kit import Owner, add_owners, post
from tests.admin.site import Site, Visitor, form_of, worker_status

NANOS = 10**9
DAY_S = 86_400.0
URL = "https://example.com/hook"
DECISION = {
    "at": 1.0, "last_at": 2.0, "count": 3, "kind": "eviction", "reason": "load", "model": "tiny",
    "worker": "worker-0", "tenant_id": "", "figures": {"waited_s": 0.5, "pages_short": 24},
    "detail": "", "candidates": [{"model_id": "other-model", "outcome": "kept: pinned"}],
}  # fmt: skip


OPTIONS = [
    {"worker_id": "worker-0", "outcome": "chosen", "is_warm": True, "load_s": 0.5, "wait_s": 0.0,
     "loss_s": 0.0, "free_bytes": 2 << 30},
    {"worker_id": "worker-1", "outcome": "begins later", "is_warm": False, "load_s": 2.0,
     "wait_s": 1.5, "loss_s": 4.0, "free_bytes": 0},
]  # fmt: skip


class Deciding(FleetHandler):
    """A dispatcher with decisions to tell: one on tiny, many on others."""

    num_others = 0

    def answer(self, line: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(line)
        if asked["ask"] != "decisions":
            return super().answer(line)
        others = [
            DECISION
            | {"kind": "load", "workers": OPTIONS, "model": f"big-{n:02}"}
            | {"at": n, "last_at": 100.0 + n}
            for n in range(self.num_others)
        ]
        rows = [row for row in [DECISION, *others] if asked["model"] in ("", row["model"])]
        return {"at": 3.0, "decisions": rows, "counts": []}


@pytest.fixture(scope="module")
def owners(site: Site) -> list[Owner]:
    """Two tenants, each with a request of two months ago."""
    site.add_model("tiny")
    found = add_owners(site.operator, "acme", "other")
    at = site.operator.clock() - 62 * DAY_S
    rows = [
        owner.posting(f"chatcmpl-{n}", cost_nanos=NANOS, posted_at=at)
        for n, owner in enumerate(found)
    ]
    post(site.operator, rows, 2)
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")
    return found


@pytest.fixture(scope="module")
def visitors(site: Site, owners: list[Owner]) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "vera", "tom")}


@pytest.fixture(scope="module")
def ann(visitors: dict[str, Visitor]) -> Visitor:
    return visitors["ann"]


def last(site: Site, num: int = 1) -> list[str]:
    return [entry.action for entry in site.read(audit.latest, num)]


def test_an_alert_is_added_tested_seen_and_removed(
    site: Site, ann: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def deliver(url: str, *_: object, **__: object) -> None:
        sent.append(url)

    monkeypatch.setattr(webhook, "deliver", deliver)
    fields = {"scope": "tenant", "owner": "nobody", "kind": "month", "sum": "50",
              "percents": "50, 80", "url": URL}  # fmt: skip
    for wrong in ({"percents": "half"}, {"url": "ftp://x"}, {"owner": ""}, {"owner": "nobody"}):
        answer = ann.post("/alert/add", {**fields, "owner": "acme", **wrong})
        assert answer.status == 422
        (name,) = wrong
        assert re.findall(r'id="f-(\w+)"[^>]* autofocus', answer.text) == [name]
    made = ann.post("/alert/add", {**fields, "owner": "acme"})
    assert re.search("whsec_[^<]+</code>", made.text)
    (named,) = limits.list_alerts(site.operator)
    assert (named.name, named.budget_nanos, named.rule.percents) == ("acme", 50 * NANOS, (50, 80))
    page = ann.get("/alerts").text
    assert "whsec_" not in page
    assert "The receiver accepted" in ann.post(f"/alert/test/{named.rule.id}", {}).text
    assert sent == [URL]
    body = '{"name": "acme", "window": "month", "spent_nanos": 40, "budget_nanos": 50}'
    raised = Alert("alt_1", named.rule.id, 1, 80, body, site.operator.clock(), None)
    site.write(alerts.raise_alerts, [raised])
    site.write(alerts.failed, "alt_1", "connection refused", None)
    assert "connection refused" in ann.get("/alerts").text
    assert "its log is deleted" in ann.get(f"/alert/remove/{named.rule.id}").text
    ann.post(f"/alert/remove/{named.rule.id}", {})
    assert limits.list_alerts(site.operator) == []
    assert last(site, 2) == ["alert.remove", "alert.add"]


@pytest.mark.parametrize(
    ("at", "scope", "owner"), [("gateway", "gateway", ""), ("model/tiny", "model", "tiny")]
)
def test_limits_of_a_model_and_of_the_server(
    site: Site, ann: Visitor, at: str, scope: Any, owner: str
) -> None:
    shown = form_of(ann.get(f"/limits/{at}").text, f"/limit/set/{at}")
    done = ann.post(f"/limit/set/{at}", {**shown, "requests_per_minute": "70"})
    assert "The limits were changed" in done.text
    assert site.read(quotas.get_limits, scope, owner).requests_per_minute == 70
    clash = ann.post(f"/limit/set/{at}", {**shown, "requests_per_minute": "80"})
    assert "set 70 in the meantime" in clash.text
    listed = ann.get("/limits").text
    assert f'href="/admin/limits/{at}' in listed
    assert "Requests per minute: 70" in listed
    assert ann.get("/limits?model=tiny").url.endswith("/limits/model/tiny")
    assert ann.get("/limits?model=tyni").status == 404


def test_a_plan_is_made_priced_and_given(site: Site, ann: Visitor, owners: list[Owner]) -> None:
    assert "The plan was created" in ann.post("/plan/add", {"name": "gold", "discount": "5"}).text
    assert "already exists" in ann.post("/plan/add", {"name": "gold", "discount": "5"}).text
    page = ann.get("/plans/gold").text
    of_discount, of_price = (form_of(page, f"/plan/{what}/gold") for what in ("discount", "price"))
    future = {"from": "2150-01-01"}
    done = ann.post("/plan/discount/gold", {**of_discount, "discount": "12.5", **future})
    assert "The discount was set" in done.text
    stale = ann.post("/plan/discount/gold", {**of_discount, "discount": "7", **future})
    assert stale.status == 409
    assert "changed in the meantime" in stale.text
    again = form_of(stale.text, "/plan/discount/gold")
    assert "The discount was set" in ann.post("/plan/discount/gold", {**again, **future}).text
    own = {**of_price, "model": "tiny", "prompt_nanos": "0.25", "completion_nanos": "1", **future}
    assert ann.post("/plan/price/gold", own).status == 409, "the plan has changed"
    own["seen"] = form_of(ann.get("/plans/gold").text, "/plan/price/gold")["seen"]
    assert ann.post("/plan/price/gold", {**own, "model": "tyni"}).status == 422
    assert "The price was set" in ann.post("/plan/price/gold", own).text
    (price,) = site.read(plans.list_plan_prices, "gold")
    assert price.price is not None
    assert (price.price.prompt_nanos, price.price.completion_nanos) == (250, 1000)
    tenant = f"/tenants/{owners[0].tenant.id}"
    terms = form_of(ann.get(tenant).text, tenant.replace("/tenants/", "/tenant/plan/"))
    give = {**terms, "plan": "gold", "discount": "2.5", **future}
    assert "The plan was set" in ann.post(tenant.replace("/tenants/", "/tenant/plan/"), give).text
    assert ann.post(tenant.replace("/tenants/", "/tenant/plan/"), give).status == 409
    (found,) = site.read(plans.list_terms, owners[0].tenant.id)
    assert (found.plan, found.discount_bp) == ("gold", 250)
    ends = {**own, "end": "1", "from": "2151-01-01"}
    ends["seen"] = form_of(ann.get("/plans/gold").text, "/plan/price/gold")["seen"]
    assert "list price applies again" in ann.post("/plan/price/gold", ends).text
    assert site.read(plans.list_plan_prices, "gold")[-1].price is None


def test_decisions_are_shown_with_their_reasons(site: Site, ann: Visitor) -> None:
    assert "no server is running" in ann.get("/decisions").text
    with telling(site, Deciding(fleet(site.operator.clock()))):
        page = ann.get("/decisions?kind=eviction").text
        assert "another model needs memory for its weights" in page
        assert "longest wait 500 ms, pages missing 24" in page
        assert "other-model</a>: kept: pinned" in page
        assert "No matching decisions" in ann.get("/decisions?kind=refusal").text
        assert "No matching decisions" in ann.get("/decisions?q=large").text


def test_decisions_are_paged_and_keep_their_filter(site: Site, ann: Visitor) -> None:
    with telling(site, handler := Deciding(fleet(site.operator.clock()))):
        handler.num_others = 45
        page, pages = ann.get("/decisions?kind=load&q=IG-").text, list[list[str]]()
        while True:
            pages.append(re.findall(r">(big-\d\d)</a>", page))
            further = re.findall(r'rel="next" href="/admin([^"]*)"', page)
            if not further:
                break
            page = ann.get(further[0].replace("&amp;", "&")).text
        assert [len(each) for each in pages] == [20, 20, 5]
        assert [*chain(*pages)] == [f"big-{n:02}" for n in reversed(range(45))]
        (back,) = re.findall(r'rel="prev" href="/admin([^"]*)"', page)
        page = ann.get(back.replace("&amp;", "&")).text
        assert re.findall(r">(big-\d\d)</a>", page) == pages[1]
        up = ann.get("/decisions?q=ig&sort=model").text
        assert re.findall(r">(big-\d\d)</a>", up) == [f"big-{n:02}" for n in range(20)]
        page = ann.get("/decisions?q=big-07").text
        assert re.findall(r">(big-\d\d)</a>", page) == ["big-07"]
        assert "2 workers considered" in page
        assert "worker-0: chosen (load 500 ms from host memory, 2.0 GiB free)" in page
        assert "worker-1: begins later (load 2 s from disk, begins in 1.5 s, 0 B free)" in page


@pytest.mark.usefixtures("owners")
def test_tables_sort_by_each_of_their_columns(site: Site, ann: Visitor) -> None:
    site.kit.dispatcher.statuses = [worker_status(ModelStatus("tiny", "cold", 0, 0, 0, 0, 0.2))]
    asked = {"format": "csv", "from": "2026-01-01", "to": "2026-01-02"}
    assert ann.post("/export/ask", {**asked, "once": "1"}).status == 200
    if not prices.list_plans(site.operator):
        prices.create_plan(site.operator, "any", 100)
    for path in ("/exports", "/plans", "/models", "/prices", "/users", "/keys?tenant=acme"):
        page = ann.get(path).text
        heads = re.findall(r'<th scope="col" class="\w+" aria-sort="\w+"><a href="([^"]*)"', page)
        assert len(heads) >= 4, path
        for head in heads:
            url = head.removeprefix("/admin").replace("&amp;", "&")
            once = ann.get(url).text
            assert len(re.findall('aria-sort="(?:as|des)cending"', once)) == 1, url
            assert once.count("<tr>") == page.count("<tr>"), url
    listed = ann.get("/keys?tenant=acme").text
    assert '<input type="hidden" name="tenant" value="acme">' in listed, "sorting keeps it"


def test_a_month_is_billed_for_all_tenants_at_once(site: Site, ann: Visitor) -> None:
    at = datetime.fromtimestamp(site.operator.clock() - 62 * DAY_S, UTC)
    month = f"{at:%Y-%m}"
    page = ann.get("/invoices").text
    assert f'<option value="{month}"' in page
    preview = ann.post("/invoice/preview-all", {"month": month}).text
    rows = re.findall(
        r'<td data-label="Tenant"><a [^>]*>(\w+)</a></td>.*?>([\d.]+)</td></tr>', preview
    )
    assert rows == [("acme", "1.00"), ("other", "1.00")]
    assert "Issue 2 invoices" in preview
    assert invoices.list_invoices(site.operator) == []
    done = ann.post("/invoice/issue-all", {"month": month})
    assert f"Issued 2 invoices for {month}" in done.text
    assert len(invoices.list_invoices(site.operator)) == 2
    again = ann.post("/invoice/preview-all", {"month": month}).text
    assert "No tenant has anything to bill" in again
    assert ann.post("/invoice/issue-all", {"month": "2026-13"}).status == 422


def test_a_request_is_corrected_once(site: Site, ann: Visitor, owners: list[Owner]) -> None:
    assert ann.get("/corrections?request=chatcmpl-9").status == 404
    page = ann.get("/corrections?request=chatcmpl-0").text
    assert owners[0].tenant.name in page
    fields = form_of(page, "/correction/add")
    done = ann.post("/correction/add", {**fields, "cost": "0.25"})
    assert "The correction was posted" in done.text
    with site.operator.reading() as session:
        _, stands = corrections.standing(session, "chatcmpl-0")
    assert stands == Right(NANOS // 4, 10, 2, 5)
    late = ann.post("/correction/add", {**fields, "cost": "0.5"})
    assert late.status == 409
    assert "Another user corrected this request" in late.text
    assert (
        "changes nothing" in ann.post("/correction/add", form_of(done.text, "/correction/add")).text
    )
    assert last(site) == ["ledger.correct"]


def test_a_scheduled_price_is_withdrawn(site: Site, ann: Visitor) -> None:
    context, now_at = site.operator, site.operator.clock()
    first = prices.set_price(context, PriceRecord("tiny", 0.0, 100))
    later = prices.set_price(context, PriceRecord("tiny", 0.0, 200), now_at + 30 * DAY_S)
    page = ann.get("/prices/tiny").text
    found = [form_of(part + "</form>", "/price/withdraw/tiny") for part in page.split("</form>")
             if "/price/withdraw/" in part]  # fmt: skip
    fields = next(one for one in found if one["valid_from"] == repr(later.valid_from))
    done = ann.post("/price/withdraw/tiny", fields)
    assert "The scheduled price was withdrawn" in done.text
    left = prices.list_prices(context, "tiny")
    assert [price.prompt_nanos for price in left] == [first.prompt_nanos]
    assert last(site) == ["price.withdraw"]
    assert ann.post("/price/withdraw/tiny", fields).status == 404, "it is gone"


def test_what_is_scheduled_of_a_plan_is_withdrawn(
    site: Site, ann: Visitor, owners: list[Owner]
) -> None:
    context, tenant = site.operator, owners[1].tenant.id
    later_at = context.clock() + 30 * DAY_S
    prices.create_plan(context, "dated", 100)
    prices.set_plan_discount(context, "dated", 200, later_at)
    prices.set_plan_price(context, "dated", "tiny", None, later_at)
    prices.set_terms(context, tenant, "dated", 0, later_at)
    for path, action in (
        ("/plans/dated", "plan.withdraw"),
        ("/plans/dated", "plan.withdraw"),
        (f"/tenants/{tenant}", "tenant.withdraw"),
    ):
        parts = [each + "</form>" for each in ann.get(path).text.split("</form>")]
        mark = f'name="valid_from" value="{later_at!r}"'
        part = next(each for each in parts if mark in each)
        (url,) = re.findall(r'action="/admin(/(?:plan/withdraw|tenant/unplan)/[^"]*)"', part)
        fields = form_of(part, url)
        assert "was withdrawn" in ann.post(url, fields).text
        assert last(site) == [action]
        assert ann.post(url, fields).status == 404, "it is gone"
    plan = prices.plan_view(context, "dated")
    assert ([each.discount_bp for each in plan.discounts], plan.prices) == ([100], [])
    assert prices.list_terms(context, tenant) == []


PAGES = ("/alerts", "/plans", "/decisions", "/limits/gateway", "/limits/model/tiny")
CHANGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("/alert/add", {"scope": "gateway", "kind": "day", "percents": "50", "url": URL}),
    ("/alert/test/x", {}),
    ("/alert/remove/x", {}),
    ("/plan/add", {"name": "mine", "discount": "1"}),
    ("/limit/set/gateway", {"requests_per_minute": "1"}),
    ("/correction/add", {"request": "chatcmpl-0", "cost": "1"}),
    ("/invoice/issue-all", {"month": "2026-09"}),
    ("/price/withdraw/tiny", {"valid_from": "1.0"}),
    ("/plan/withdraw/dated", {"valid_from": "1.0"}),
)


def test_who_may_not_is_refused(
    site: Site, visitors: dict[str, Visitor], owners: list[Owner]
) -> None:
    before = site.read(audit.latest, 1)
    for path in PAGES:
        assert visitors["vera"].get(path).status == 200, path
        assert visitors["tom"].get(path).status == 403, path
    for who in ("vera", "tom"):
        for path, fields in CHANGES:
            answer = visitors[who].post(path, fields, csrf=visitors[who].get("/account").csrf)
            assert answer.status == 403, (who, path)
        plan = f"/tenant/plan/{owners[0].tenant.id}"
        assert visitors[who].post(plan, {"plan": "", "discount": "9"}).status == 403
    assert site.read(audit.latest, 1) == before
