"""What a load would take and what would leave, on the page and by the command line."""

import json
import re
from collections.abc import Iterator

import pytest

from admin.cli.main import main
from admin.live.load_plan import plan_load
from registry import audit
from registry.errors import IllegalTransition
from registry.models import catalog
from tests.admin.fleet_handler import PAGE, FleetHandler, fleet, model, status, telling
from tests.admin.site import Site, Visitor

NAMES = ("idle", "busy", "stays")


@pytest.fixture(scope="module", autouse=True)
def _loaded(site: Site) -> Iterator[None]:
    """Three models of 32 pages on a worker of 256: one idle, one busy, one pinned."""
    for name in NAMES:
        site.add_model(name)
    site.add_model("small", weight_bytes=40 * PAGE)
    site.add_model("medium", weight_bytes=140 * PAGE)
    site.add_model("large", weight_bytes=190 * PAGE)
    site.add_model("huge", weight_bytes=250 * PAGE)
    site.write(catalog.set_pinned, "stays", True, now_at=site.operator.clock())
    rows = status(model("busy", running=2), model("idle"), model("stays"))
    site.kit.dispatcher.statuses = [rows]
    with telling(site, FleetHandler(fleet(site.operator.clock(), rows))):
        yield


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    return site.visitor("ann")


def gone(page: str) -> list[str]:
    """Models that would be evicted, in their order."""
    return re.findall(r'<td data-label="Model"><a href="/admin/models/(\w+)"', page)


def test_nothing_is_loaded_before_it_is_said_what_leaves(site: Site, ann: Visitor) -> None:
    before = site.read(audit.latest, 1)
    model_page = ann.get("/models/small").text
    assert 'href="/admin/model/confirm/load/small"' in model_page
    assert 'action="/admin/model/do/load/small"' not in model_page
    fits = ann.get("/model/confirm/load/small").text
    assert "No model is evicted" in fits
    assert 'action="/admin/model/do/load/small"' in fits
    assert gone(ann.get("/model/confirm/load/large").text) == ["idle", "busy"]
    assert gone(ann.get("/model/confirm/load/medium").text) == [], "KV kept for reuse makes room"
    never = ann.get("/model/confirm/load/huge").text
    assert "beside the pinned models: stays" in never
    assert 'action="/admin/model/do/load/huge"' not in never
    there = ann.get("/model/confirm/load/idle").text
    assert "The model is loaded on worker-0" in there
    assert site.read(audit.latest, 1) == before


def test_the_command_line_says_the_same(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ("--data-dir", str(site.operator.data_dir))
    assert main(["models", "load", "large", "--dry-run", "--json", *folder]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["worker"], told["fit"]) == ("worker-0", "evicts")
    assert [(one["model"], one["is_busy"]) for one in told["leavers"]] == [
        ("idle", False),
        ("busy", True),
    ]
    assert main(["models", "load", "large", "--dry-run", *folder]) == 0
    assert re.search(r"^idle +64.0 MiB +no", capsys.readouterr().out, re.M)


def test_only_a_ready_model_has_a_plan(site: Site) -> None:
    site.write(catalog.add_model, "new", "/models/new", now_at=site.operator.clock())
    with pytest.raises(IllegalTransition, match="only a ready one"):
        plan_load(site.operator, "new", [])
    assert plan_load(site.operator, "small", []).worker == ""
