"""What pages say of a registry and of the running server, without a browser."""

import re
from pathlib import Path

import msgspec
import pytest

from admin.pages import PAGES, STREAMS
from admin.registration import preflight
from admin.registration.preflight import Preflight
from admin.registration.register_process import RegisterEvent
from admin.web.request import PageRoute, StreamRoute
from admin.web.session import ROUTES
from engine.protocol import ModelStatus
from registry.models import catalog, registrations
from registry.models.catalog import NEXT
from registry.money import prices
from registry.money.prices import PriceRecord
from tests.admin.site import MIB, Site, Visitor, worker_status

DOCS = Path(__file__).resolve().parents[2] / "docs" / "admin.md"


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    site.add_model("tiny")
    return site.visitor("ann")


def test_every_path_is_documented() -> None:
    page = DOCS.read_text(encoding="utf-8")
    routes: tuple[PageRoute | StreamRoute, ...] = (*PAGES, *ROUTES, *STREAMS)
    paths = {route.path.replace(":path}", "}") for route in routes}
    assert not sorted(path for path in paths if f"`{path}`" not in page)


def test_a_list_says_where_each_model_is(site: Site, ann: Visitor) -> None:
    site.add_model("warm-one")
    row = ModelStatus("tiny", "resident", 64 * MIB, 0, 1, 0, 0.25)
    warm = ModelStatus("warm-one", "warm", 64 * MIB, 0, 0, 0, 0.5)
    site.kit.dispatcher.statuses = [worker_status(row, warm)]
    text = ann.get("/models").text
    assert re.search(r'data-part="state:tiny">.*?resident', text, re.DOTALL)
    assert "1 on a device" in text
    assert "250 ms" in text
    for where, there, absent in (("device", "tiny", "warm-one"), ("warm", "warm-one", "tiny")):
        listed = ann.get(f"/models?where={where}").text
        assert f"state:{there}" in listed
        assert f"state:{absent}" not in listed
    assert "state:tiny" not in ann.get("/models?where=cold").text


def test_prices_and_lately_asked(site: Site, ann: Visitor) -> None:
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        price = PriceRecord("tiny", now_at + 1, prompt_nanos=500, completion_nanos=1500)
        prices.set_price(session, price, now_at=now_at)
    assert "0.5 / 1.5" not in ann.get("/models").text, "it does not hold yet"
    assert "Requests by hour" in ann.get("/models/tiny").text


def test_a_registration_is_seen_until_it_ends(site: Site, ann: Visitor) -> None:
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        row = catalog.add_model(
            session, "tiny" + NEXT, "/models/tiny-2", now_at=now_at, registrar_host="elsewhere"
        )
        registrations.progress(session, row.registration, "convert", 30, 120, now_at=now_at)
    page = ann.get("/models/tiny").text
    assert "Registration of /models/tiny-2" in page
    assert 'value="30"' in page
    assert "new revision" in ann.get("/models").text
    site.write(catalog.fail, row.registration, "parity", "not the same", now_at=now_at)
    page = ann.get("/models/tiny").text
    assert "failed: parity" in page
    assert "/admin/model/do/retry/tiny" in page


def test_a_registration_whose_process_is_gone_is_told_so(site: Site, ann: Visitor) -> None:
    site.write(catalog.add_model, "lost", "/models/lost", now_at=site.operator.clock() - 3600)
    assert "interrupted" in ann.get("/models/lost").text
    assert "Retry" in ann.get("/models/lost").text


def test_the_audit_log_pages_and_filters(site: Site, ann: Visitor) -> None:
    for number in range(60):
        site.add_model(f"m-{number:02}")
    first = ann.get("/audit?action=model").text
    assert first.count("model.ready") + first.count("model.add") >= 25
    older = re.search(r'rel="next" href="([^"]+)"', first)
    assert older is not None
    second = ann.get(older.group(1).replace("&amp;", "&").removeprefix("/admin")).text
    assert "Newest" in second
    assert "user.create" in ann.get("/audit?action=user").text
    assert "model.add" not in ann.get("/audit?action=user").text
    assert "No matching entries" in ann.get("/audit?target=nothing").text


def test_pages_of_models_are_walked_by_key(site: Site, ann: Visitor) -> None:
    page, seen = ann.get("/models?sort=name").text, list[str]()
    while True:
        seen += re.findall(r'data-part="state:([^"]+)"', page)
        following = re.search(r'rel="next" href="([^"]+)"', page)
        if following is None:
            break
        page = ann.get(following.group(1).replace("&amp;", "&").removeprefix("/admin")).text
    with site.operator.reading() as session:
        assert seen == [model.name for model in catalog.list_models(session)]
    assert len(seen) > 50


def test_health_says_what_is_wrong(site: Site, ann: Visitor) -> None:
    site.kit.dispatcher.statuses = []
    assert "No worker is connected" in ann.get("/health").text
    site.kit.dispatcher.is_ready = False
    assert "Requests cannot be served" in ann.get("/health").text
    site.kit.dispatcher.is_ready = True
    assert "Requests can be served" in ann.get("/health").text


def test_a_user_is_made_given_a_role_and_removed(site: Site, ann: Visitor) -> None:
    bad = ann.post("/user/add", {"name": "bob", "password": "short", "role": "viewer"})
    assert bad.status == 422
    assert "8 to 256" in bad.text
    assert 'value="bob"' in bad.text, "what was typed stays"
    ann.post("/user/add", {"name": "bob", "password": "long enough now", "role": "viewer"})
    assert site.visitor("bob", "long enough now").get("/models").status == 200
    assert "unknown tenant" in ann.post("/user/role/bob", {"role": "owner", "tenant": "none"}).text
    assert "roles were changed" in ann.post("/user/role/bob", {"role": "admin"}).text
    assert "has a new password" in ann.post("/user/password/bob", {"password": "yet another"}).text
    assert "was disabled" in ann.post("/user/disabled/bob", {"disabled": "1"}).text
    assert ann.post("/user/remove/ann", {}).status == 409, "the last owner stays"
    assert "bob was removed" in ann.post("/user/remove/bob", {}).text


def test_facts_of_an_embedding_model(site: Site, ann: Visitor) -> None:
    site.add_model("embedder", task="embed", dim=384)
    assert "384 dimensions" in ann.get("/models/embedder").text


def test_instants_of_the_audit_log_are_for_people(site: Site, ann: Visitor) -> None:
    site.add_user("zoe", "viewer")
    page = ann.get("/audit?target=zoe").text
    assert re.search(r"password set</span> \d{4}-\d\d-\d\d \d\d:\d\d UTC", page)


def test_the_wizards_outlook_spares_pins_and_takes_kept_kv(
    site: Site, ann: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add_model("stays")
    site.write(catalog.set_pinned, "stays", True, now_at=site.operator.clock())
    rows = [ModelStatus(name, "resident", 200 * MIB, 0, 0, 0, 0.1) for name in ("stays", "tiny")]
    told = worker_status(*rows, free_pages=26)
    kept = msgspec.structs.replace(told, pages={**told.pages, "tiny/kv_cached": 30})
    site.kit.dispatcher.statuses = [kept]
    size = [100 * MIB]

    def found(*_: object, **__: object) -> Preflight:
        return Preflight("/new", RegisterEvent("preflight", "/new", weight_bytes=size[0]))

    monkeypatch.setattr(preflight, "look", found)
    asked = {"name": "new", "source": "/new", "dtype": "auto"}
    assert "It fits beside the loaded models" in ann.post("/register/check", asked).text
    size[0] = 300 * MIB
    assert "Loading it now would evict tiny" in ann.post("/register/check", asked).text
    size[0] = 400 * MIB
    assert "does not fit beside the pinned models" in ann.post("/register/check", asked).text


def test_a_model_whose_files_took_too_much_says_so(site: Site, ann: Visitor) -> None:
    assert "took too much time or memory" not in ann.get("/models/tiny").text
    site.kit.edge.metrics.prepare_offences.labels("tiny").inc(3)
    text = ann.get("/models/tiny").text
    assert "<dt>Ended requests</dt><dd>3</dd>" in text
    assert "took too much time or memory" in text
