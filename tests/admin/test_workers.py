"""Workers on the page on health and by the command line: what they do, and orders to them."""

import json
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from admin.cli.main import main
from admin.live.workers import list_workers
from registry import audit
from registry.models import worker_orders
from tests.admin.fleet_handler import FleetHandler, fleet, model, status, telling
from tests.admin.site import Site, Visitor


@pytest.fixture(scope="module", autouse=True)
def handler(site: Site) -> Iterator[FleetHandler]:
    """Two workers, and one that is gone."""
    site.add_model("alpha")
    now_at = site.operator.clock()
    one, two = (status(model("alpha", running=n), worker=f"worker-{n}") for n in (0, 1))
    told = fleet(
        now_at,
        replace(one, started_at=now_at - 60),
        replace(two, started_at=now_at - 70),
        lost={"worker-2": now_at - 5},
    )
    workers = [replace(told.workers[0], labels=("left",)), replace(told.workers[1], num_running=1)]
    with telling(site, FleetHandler(replace(told, workers=workers))) as found:
        yield found


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    return site.visitor("ann")


def polyhost(site: Site, *arguments: str) -> int:
    return main([*arguments, "--data-dir", str(site.operator.data_dir)])


def test_the_list_has_all_with_what_is_wanted_of_them(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert polyhost(site, "workers", "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"], row["num_running"]) for row in rows] == [
        ("worker-0", "serving", 0),
        ("worker-1", "serving", 1),
        ("worker-2", "down", 0),
    ]
    assert (rows[0]["labels"], rows[0]["num_models"]) == (["left"], 1)
    assert polyhost(site, "workers", "list") == 0
    assert "worker-2  down" in capsys.readouterr().out


def test_orders_are_kept_and_audited(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert polyhost(site, "workers", "drain", "worker-1") == 0
    assert polyhost(site, "workers", "restart", "--all") == 0
    orders = site.read(worker_orders.all_orders)
    assert {name: order.drained for name, order in orders.items()} == {
        "worker-0": False,
        "worker-1": True,
        "worker-2": False,
    }
    # Of a process that is not there none has to be replaced.
    assert [orders[f"worker-{n}"].restart_of > 0 for n in range(3)] == [True, True, False]
    entries = site.read(audit.latest, 4)
    assert {entry.action for entry in entries} == {"worker.drain", "worker.restart"}
    views = {view.name: view for view in list_workers(site.operator)}
    assert views["worker-0"].restarts
    assert not views["worker-0"].is_settled
    assert not views["worker-2"].restarts  # its next process begins later
    assert polyhost(site, "workers", "resume", "worker-1") == 0
    assert site.read(worker_orders.all_orders)["worker-1"].drained is False


def test_books_are_checked_and_what_is_wrong_is_the_exit_status(
    site: Site, handler: FleetHandler, capsys: pytest.CaptureFixture[str]
) -> None:
    handler.checks = {"dispatcher": {"state": "ok", "text": ""}}
    assert polyhost(site, "workers", "check") == 0
    assert "dispatcher  ok" in capsys.readouterr().out
    handler.checks["worker-1"] = {"state": "broken", "text": "page 3 has two owners"}
    assert polyhost(site, "workers", "check") == 1
    assert "worker-1    broken  page 3 has two owners" in capsys.readouterr().out
    assert polyhost(site, "workers", "check", "--json") == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"]) for row in rows] == [
        ("dispatcher", "ok"),
        ("worker-1", "broken"),
    ]


def test_a_worker_that_is_not_there_is_named_and_nothing_is_ordered(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    before = site.read(worker_orders.all_orders)
    assert polyhost(site, "workers", "drain", "worker-0", "worker-9") == 1
    assert "no worker 'worker-9'; the server has: worker-0, worker-1" in capsys.readouterr().err
    assert site.read(worker_orders.all_orders) == before
    for arguments in ((), ("worker-0", "--all")):
        assert polyhost(site, "workers", "drain", *arguments) != 0
        assert "name the workers to drain, or give --all" in capsys.readouterr().err


def test_the_page_shows_states_and_asks_before_it_orders(
    site: Site, ann: Visitor, handler: FleetHandler
) -> None:
    site.write(worker_orders.order, "worker-1", "resume", now_at=1.0)
    page = ann.get("/health").text
    assert 'href="/admin/worker/confirm/drain/worker-1"' in page
    assert "left" in page
    asked = ann.get("/worker/confirm/drain/worker-1").text
    assert "loaded on other workers first" in asked
    done = ann.post("/worker/do/drain/worker-1", {})
    assert "worker-1 is being drained" in done.text
    assert site.read(worker_orders.all_orders)["worker-1"].drained
    assert 'href="/admin/worker/confirm/resume/worker-1"' in ann.get("/health").text
    assert ann.get("/worker/confirm/explode/worker-1").status == 404
    assert ann.post("/worker/do/drain/worker-9", {}).status == 404
    ann.post("/worker/do/resume/worker-1", {})
    assert not site.read(worker_orders.all_orders)["worker-1"].drained


def test_who_may_only_look_sees_no_buttons(site: Site) -> None:
    site.add_user("vera", "viewer")
    vera = site.visitor("vera")
    assert "worker/confirm" not in vera.get("/health").text
    assert vera.post("/worker/do/drain/worker-0", {}).status == 403
