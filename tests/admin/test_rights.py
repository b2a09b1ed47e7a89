"""Roles hold on the server: a viewer, another tenant's user and hostile names, page by page."""

import pytest

from registry import audit
from registry.accounts import api_keys, tenants
from registry.models import catalog
from tests.admin.site import Site, Visitor

HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture(scope="module", autouse=True)
def _people(site: Site) -> None:
    site.add_model("tiny")
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        for name in ("acme", "other"):
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            api_keys.create_key(session, tenant.id, f"key of {name}", now_at=now_at)
    site.add_user("vera", "viewer")
    site.add_user("olga", "admin")
    site.add_user("tom", "owner", "acme")


def pinned(site: Site) -> bool:
    return site.read(catalog.get_model, "tiny").pinned


CHANGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("/model/do/pin/tiny", {}),
    ("/model/do/load/tiny", {}),
    ("/model/do/remove/tiny", {}),
    ("/model/do/rollback/tiny", {"to": "rev"}),
    ("/model/do/cancel/tiny", {}),
    ("/model/do/retry/tiny", {}),
    ("/model/smoke/tiny", {"prompt": "hello", "key": "key_1"}),
    ("/register", {"name": "x", "source": "org/x", "dtype": "auto"}),
    ("/register/check", {"name": "x", "source": "org/x", "dtype": "auto"}),
    ("/user/add", {"name": "x", "password": "long enough", "role": "owner"}),
    ("/user/role/ann", {"role": "viewer"}),
    ("/user/password/ann", {"password": "long enough"}),
    ("/user/disabled/ann", {"disabled": "1"}),
    ("/user/remove/ann", {}),
    ("/user/bind/ann", {"subject": "mine"}),
    ("/user/unbind/ann", {"issuer": "https://id.example"}),
)


@pytest.mark.parametrize("who", ["vera", "tom"])
@pytest.mark.parametrize(("path", "fields"), CHANGES, ids=[path for path, _ in CHANGES])
def test_who_may_not_change_it_is_refused(
    site: Site, visitors: dict[str, Visitor], who: str, path: str, fields: dict[str, str]
) -> None:
    before = site.read(audit.latest, 1)
    answer = visitors[who].post(path, fields, csrf=visitors[who].get("/account").csrf)
    assert answer.status in (403, 404, 422), answer.text
    assert "does not have the right" in answer.text or "unknown user" in answer.text
    assert site.read(audit.latest, 1) == before


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once: a password takes a while to look at."""
    return {name: site.visitor(name) for name in ("ann", "vera", "olga", "tom")}


def test_a_viewer_sees_and_is_offered_nothing_to_do(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    vera = visitors["vera"]
    for path in ("/models", "/models/tiny", "/health", "/audit"):
        assert vera.get(path).status == 200, path
    assert vera.get("/users").status == 403
    page = vera.get("/models/tiny").text
    for offer in ("Unload", "Pin", "Remove", "New revision", "Test prompt"):
        assert offer not in page
    assert "/admin/users" not in page
    assert 'href="/admin/register"' not in vera.get("/models").text


def test_an_admin_changes_models_and_sees_no_users(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    olga = visitors["olga"]
    assert "was pinned" in olga.post("/model/do/pin/tiny", {}).text
    assert pinned(site)
    olga.post("/model/do/unpin/tiny", {})
    assert not pinned(site)
    assert olga.get("/users").status == 403
    assert olga.post("/user/add", {"name": "x", "password": "long enough", "role": "owner"},
                     csrf=olga.get("/account").csrf).status in (403, 422)  # fmt: skip


def test_a_tenants_user_sees_that_tenant_alone(site: Site, visitors: dict[str, Visitor]) -> None:
    tom = visitors["tom"]
    for path in ("/models", "/models/tiny", "/audit", "/health", "/register"):
        assert tom.get(path).status == 403, path
    assert tom.get("/live/models").status == 401, "a stream tells no more than the page"
    found = tom.get("/search.json?q=o").text
    assert "other" not in found
    assert "tiny" not in tom.get("/search.json?q=tiny").text
    users_page = tom.get("/users").text
    assert "tom" in users_page
    assert "vera" not in users_page
    assert tom.get("/users/vera").status == 404


def test_one_ends_ones_own_sessions_and_an_owner_everybodys(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    again = site.visitor("vera")
    mine = again.get("/account").text
    assert mine.count("/admin/sessions/end/") == 1, "the present one has no button"
    other = mine.partition("/admin/sessions/end/")[2].partition('"')[0]
    assert visitors["olga"].post(f"/sessions/end/{other}", {}).status == 403
    assert visitors["ann"].post(f"/sessions/end/{other}", {}).status == 200
    assert "sign-in" in visitors["vera"].get("/account").url
    assert again.get("/account").url.endswith("/account")
    visitors["vera"].sign_in("vera")


def test_names_are_text_wherever_they_are_shown(site: Site, visitors: dict[str, Visitor]) -> None:
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        tenants.create_tenant(session, HOSTILE, now_at=now_at)
        row = catalog.add_model(session, "hostile", HOSTILE, now_at=now_at)
        catalog.fail(session, row.registration, HOSTILE[:60], HOSTILE, now_at=now_at)
    ann = visitors["ann"]
    for path in ("/models", "/models/hostile", "/audit", "/audit?target=hostile", "/search?q=scr"):
        page = ann.get(path)
        assert page.status == 200
        assert "<script>alert" not in page.text, path
    assert "&lt;script&gt;alert" in ann.get("/models/hostile").text
    told = ann.post("/register", {"name": HOSTILE, "source": "/nowhere", "dtype": "auto"})
    assert told.status == 409
    assert "<script>alert" not in told.text
    assert ann.get("/search.json?q=script").headers["content-type"] == "application/json"


def test_what_is_not_there_is_said(site: Site, visitors: dict[str, Visitor]) -> None:
    ann = visitors["ann"]
    assert ann.get("/models/no-such-model").status == 404
    assert ann.get("/users/nobody").status == 404
    assert ann.get("/model/confirm/explode/tiny").status == 404
    assert ann.post("/model/do/explode/tiny", {}).status == 404
    assert ann.post("/sessions/end/0123456789abcdef", {}).status == 404
    odd = ("after=x", "after=WzEsMl0", "before=%00", "sort=-;drop", "state=x", "q=%25%25", "q=%")
    for query in (*odd, "sort=name&after=WzEsMl0"):
        assert ann.get(f"/models?{query}").status == 200, query
    assert ann.get("/audit?before=99999999999999999999").status == 200
    assert ann.get("/search.json?q=_").text == "[]", "no wildcard: nothing is called that"
