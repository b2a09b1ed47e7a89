"""A database that is away, and text that no database takes: a page says so, and nothing fails."""

import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.site import Site, Visitor, running_site
from tests.postgres import PostgresServer, own_server

NUL = "%00"
HALF_A_PAIR = "WyJcdWQ4MDAiLCJhIl0"  # ["\ud800","a"] as a page's cursor
ENDLESS = "WzFlOTk5LCJhIl0"  # [1e999,"a"]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """PostgreSQL of this file alone, so that it may be killed."""
    with own_server() as running:
        yield running


@pytest.fixture(scope="module")
def shared(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site over it."""
    folder: Path = tmp_path_factory.mktemp("outage")
    with running_site(folder, database_url=server.url("postgres")) as running:
        running.add_model("tiny")
        yield running


@pytest.fixture(scope="module")
def ann(shared: Site) -> Visitor:
    """The owner."""
    return shared.visitor("ann")


@pytest.mark.parametrize("path", ["/models", "/tenants", "/keys", "/search", "/search.json"])
def test_an_address_may_say_anything(ann: Visitor, path: str) -> None:
    odd = [f"q={NUL}", "q=%ff%ed%a0%80", f"sort=name&after={HALF_A_PAIR}", f"after={ENDLESS}"]
    for query in (*odd, f"sort=-requests&before={ENDLESS}"):
        assert ann.get(f"{path}?{query}").status == 200, query


def test_a_nul_names_nothing(shared: Site, ann: Visitor) -> None:
    for path in ("/models/", "/users/", "/tenants/", "/keys/", "/model/confirm/unload/"):
        assert ann.get(path + NUL).status == 404, path
    assert ann.get(f"/live/model/{NUL}").status == 401
    told = ann.post("/register/check", {"name": "x\0", "source": "org/x", "dtype": "auto"})
    assert told.status == 400
    assert shared.visitor().sign_in("ann\0", "a password").status == 400
    assert ann.get("/audit?target=" + urllib.parse.quote("\0")).status == 200


def test_a_database_that_is_away_is_said_and_forgotten(
    shared: Site, server: PostgresServer, ann: Visitor
) -> None:
    server.kill()
    try:
        for path in ("/models", "/account", "/models/tiny"):
            page = ann.get(path)
            assert page.status == 503, path
            assert "The database does not answer" in page.text
        assert ann.post("/model/do/pin/tiny", {}, csrf="00").status == 503
        assert shared.visitor().sign_in("ann").status == 503
        assert ann.get("/live/models").status == 503
        assert shared.visitor().get("/sign-in").status == 200
    finally:
        server.start()
    assert ann.get("/models").status == 200
