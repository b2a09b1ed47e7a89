"""The floor of a tenant's models through its page: set, changed by two, taken away; who may not."""

import threading
from collections.abc import Iterator

import pytest

from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import tenants as verbs
from registry import audit
from registry.accounts import tenants
from registry.audit import AuditFilter
from registry.models import floors
from registry.models.floors import MAX_FLOOR_MODELS, ModelFloor
from tests.admin.browser import Browser
from tests.admin.site import PASSWORD, Site, Visitor, form_of

GIB = 1 << 30
HOSTILE = "<script>alert('x')</script>"


@pytest.fixture(scope="module", autouse=True)
def _people(site: Site) -> None:
    for name in ("tiny", "small", "large"):
        site.add_model(name)
    site.add_user("bob", "admin")
    site.add_user("vera", "viewer")
    with site.operator.writing() as session:
        for name in ("acme", "other"):
            tenants.create_tenant(session, name, now_at=site.operator.clock())
    site.add_user("tom", "owner", "acme")


@pytest.fixture(autouse=True)
def _no_floor(site: Site) -> Iterator[None]:
    yield
    verbs.set_model_floor(site.operator, "acme", 0, ())


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "bob", "vera", "tom")}


def tenant_id(site: Site, name: str = "acme") -> str:
    return site.read(tenants.get_tenant, name).id


def floor(site: Site) -> ModelFloor | None:
    with site.operator.reading() as session:
        return floors.get_floor(session, tenants.get_tenant(session, "acme").id)


def shown_to(visitor: Visitor, at: str) -> dict[str, str]:
    return form_of(visitor.get(f"/tenants/{at}").text, f"/tenant/floor/{at}")


def test_a_floor_is_set_changed_and_taken_away(site: Site, visitors: dict[str, Visitor]) -> None:
    ann, at = visitors["ann"], tenant_id(site)
    action = f"/tenant/floor/{at}"
    shown = shown_to(ann, at)
    assert (shown["size"], shown["models"]) == ("", "")
    done = ann.post(action, {**shown, "size": "20.5", "models": "tiny\r\nlarge, tiny"})
    assert "Saved" in done.text
    assert floor(site) == ModelFloor(at, 41 * GIB // 2, ("large", "tiny"))
    shown = shown_to(ann, at)
    assert (shown["size"], shown["models"].split()) == ("20.5", ["large", "tiny"])
    (entry,) = site.read(audit.page, AuditFilter(action="tenant.floor", target=at), limit=1)
    assert entry.actor == "admin:ann"
    assert entry.after == {"size_bytes": 41 * GIB // 2, "models": ["large", "tiny"]}
    assert "Saved" in ann.post(action, {**shown, "size": "", "models": ""}).text
    assert floor(site) is None
    ann.post(action, {"size": "1", "models": "tiny"})
    assert "Saved" in ann.post(action, {**shown_to(ann, at), "size": "0"}).text
    assert floor(site) is None


@pytest.mark.parametrize("size_bytes", [1, 3, 512 << 20, 10**10, GIB - 1, (1 << 50) - 1, 1 << 50])
def test_what_stands_in_the_form_is_what_holds_to_the_byte(
    site: Site, visitors: dict[str, Visitor], size_bytes: int
) -> None:
    ann, at = visitors["ann"], tenant_id(site)
    verbs.set_model_floor(site.operator, "acme", size_bytes, ["tiny"])
    shown = shown_to(ann, at)
    done = ann.post(f"/tenant/floor/{at}", {**shown, "models": "tiny\nsmall"})
    assert "Saved" in done.text
    assert floor(site) == ModelFloor(at, size_bytes, ("small", "tiny"))


@pytest.mark.parametrize(
    ("size", "models", "said"),
    [
        ("", "tiny", "Enter how much to keep"),
        ("5", "", "Name the tenant&#39;s models."),
        ("-1", "tiny", "Enter a number of at least 0"),
        ("many", "tiny", "Enter a number of at least 0"),
        ("1e3", "tiny", "Enter a number of at least 0"),
        ("nan", "tiny", "Enter a number of at least 0"),
        ("2000000", "tiny", "a memory floor must be"),
        ("5", "nobody", "nobody"),
        ("5", HOSTILE, "&lt;script&gt;"),
        ("5", " ".join(f"m{n}" for n in range(MAX_FLOOR_MODELS + 1)), "models, got"),
        ("5", "x" * 9001, "At most 9000 characters"),
    ],
)
def test_what_cannot_be_is_said_and_stays_as_typed(
    site: Site, visitors: dict[str, Visitor], size: str, models: str, said: str
) -> None:
    ann, at = visitors["ann"], tenant_id(site)
    verbs.set_model_floor(site.operator, "acme", GIB, ["tiny"])
    action = f"/tenant/floor/{at}"
    answer = ann.post(action, {**shown_to(ann, at), "size": size, "models": models})
    assert answer.status == 422
    assert said in answer.text
    assert HOSTILE not in answer.text
    assert form_of(answer.text, action)["size"] == size
    assert floor(site) == ModelFloor(at, GIB, ("tiny",))


def test_what_others_did_stays_and_clashes_are_shown(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, bob, at = visitors["ann"], visitors["bob"], tenant_id(site)
    action = f"/tenant/floor/{at}"
    verbs.set_model_floor(site.operator, "acme", GIB, ["tiny"])
    anns, bobs = shown_to(ann, at), shown_to(bob, at)
    assert "Saved" in bob.post(action, {**bobs, "size": "7"}).text
    assert "Saved" in ann.post(action, {**anns, "models": "tiny small"}).text
    assert floor(site) == ModelFloor(at, 7 * GIB, ("small", "tiny"))
    refused = ann.post(action, {**anns, "size": "9"})
    assert refused.status == 409
    assert "admin:bob set 7 in the meantime" in refused.text
    assert "Nothing was saved" in refused.text
    again = form_of(refused.text, action)
    assert (again["size"], again["models"].split()) == ("9", ["small", "tiny"])
    assert "Saved" in ann.post(action, again).text
    assert floor(site) == ModelFloor(at, 9 * GIB, ("small", "tiny"))
    assert "Saved" in bob.post(action, {**shown_to(bob, at), "size": "", "models": ""}).text
    assert ann.post(action, {**again, "size": "8"}).status == 409, "it was taken away meanwhile"
    assert floor(site) is None


def test_forms_sent_at_the_same_moment_both_count(site: Site, visitors: dict[str, Visitor]) -> None:
    at = tenant_id(site)
    action = f"/tenant/floor/{at}"
    tokens = {name: visitors[name].get("/account").csrf for name in ("ann", "bob")}
    for turn in range(1, 7):
        verbs.set_model_floor(site.operator, "acme", GIB, ["tiny"])
        shown = shown_to(visitors["ann"], at)
        gate, answers = threading.Barrier(2), list[int]()

        def send(
            name: str,
            change: dict[str, str],
            gate: threading.Barrier = gate,
            shown: dict[str, str] = shown,
            answers: list[int] = answers,
        ) -> None:
            gate.wait(30)
            answers.append(visitors[name].post(action, {**shown, **change}, tokens[name]).status)

        changes = {"ann": {"size": str(1 + turn)}, "bob": {"models": "large"}}
        threads = [threading.Thread(target=send, args=each) for each in changes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [200, 200]
        assert floor(site) == ModelFloor(at, (1 + turn) * GIB, ("large",))


def test_the_verb_does_nothing_to_another_floor_than_was_looked_at(site: Site) -> None:
    seen = verbs.floor_mark(floor(site))
    verbs.set_model_floor(site.operator, "acme", GIB, ["tiny"])
    with pytest.raises(ChangedMeanwhile):
        verbs.set_model_floor(site.operator, "acme", 2 * GIB, ["tiny"], seen)
    with pytest.raises(ChangedMeanwhile):
        verbs.set_model_floor(site.operator, "acme", 0, (), seen)
    seen = verbs.floor_mark(floor(site))
    verbs.set_model_floor(site.operator, "acme", 0, (), seen)
    assert floor(site) is None


@pytest.mark.parametrize("who", ["vera", "tom"])
def test_who_may_not_set_it_sees_it_alone(
    site: Site, visitors: dict[str, Visitor], who: str
) -> None:
    at, visitor = tenant_id(site), visitors[who]
    action = f"/tenant/floor/{at}"
    assert "Memory floor" not in visitor.get(f"/tenants/{at}").text
    verbs.set_model_floor(site.operator, "acme", 2 * GIB, ["small", "tiny"])
    page = visitor.get(f"/tenants/{at}").text
    assert "at least 2.0 GiB of small, tiny loaded" in page
    assert action not in page
    assert visitor.post(action, {"size": "9", "models": "tiny"}).status == 403
    forged = visitors["ann"].post(action, {"size": "9", "models": "tiny"}, csrf="00" * 64)
    assert forged.status == 403
    assert floor(site) == ModelFloor(at, 2 * GIB, ("small", "tiny"))
    if who == "tom":
        other = tenant_id(site, "other")
        assert visitor.post(f"/tenant/floor/{other}", {"size": "1", "models": "tiny"}).status == 403
    assert visitors["ann"].post("/tenant/floor/ten_none", {}).status == 404


@pytest.mark.parametrize("scripts", [True, False])
def test_in_a_browser(site: Site, browser: Browser, scripts: bool) -> None:
    at = tenant_id(site)
    with browser.open(site.url, scripts=scripts) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go(f"/tenants/{at}")
        page.fill("#floor input[name=size]", "1.5")
        page.fill("#floor textarea[name=models]", "tiny\nnot there")
        page.click("#floor button")
        page.wait_for_selector("#floor >> text=not")
        assert floor(site) is None
        page.fill("#floor textarea[name=models]", "tiny\nlarge")
        page.click("#floor button")
        page.wait_for_selector("text=Workers apply the change")
        assert page.input_value("#floor input[name=size]") == "1.5"
        if scripts:
            visit.check_accessible()
            visit.check_layout()
            visit.shoot("tenant-floor")
    assert floor(site) == ModelFloor(at, 3 * GIB // 2, ("large", "tiny"))
