"""Shares against what is due, waiting times, queues and refusals: what the page says of them."""

import re
from collections.abc import Iterator

import pytest

from admin.context.operator_context import acting_as
from admin.operations.server import WINDOW_S, fair_shares, quantile
from gateway.ipc.control_socket import ask, operator_socket
from registry.accounts import tenants, users
from registry.errors import Forbidden, RegistryError
from registry.money import ledger
from registry.money.ledger import Posting
from tests.admin.site import Site, Visitor, worker_status


@pytest.fixture(scope="module")
def ids(site: Site) -> dict[str, str]:
    """Tenants with weights, and what each was given in the last minutes: light waited long."""
    site.add_model("tiny")
    given = {"heavy": (1.0, 8.0, 0.01), "light": (1.0, 1.0, 3.0), "quiet": (2.0, 1.0, 0.02)}
    found = {}
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        for name, (weight, _, _) in given.items():
            found[name] = tenants.create_tenant(session, name, weight, now_at=now_at).id
        postings = [
            posting(f"{name}-{n}", found[name], service_s / 10, queue_s * n, now_at - 60 + n)
            for name, (_, service_s, queue_s) in given.items()
            for n in range(1, 11)
        ]
        old = posting("old", found["quiet"], 1000.0, 9.0, now_at - WINDOW_S - 60)
        cached = posting("hit", found["quiet"], 0.0, 0.0, now_at, outcome="cache_hit")
        ledger.post_many(session, [*postings, old, cached])
    return found


def posting(
    name: str,
    tenant_id: str,
    service_s: float,
    queue_s: float,
    posted_at: float,
    outcome: str = "finished",
) -> Posting:
    return Posting(
        f"chatcmpl-{name}", tenant_id, "key_1", "tiny", "rev", "chat", outcome,
        1, 0, 1, 1, service_s, queue_s, 0.5, 1.0, posted_at,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ann(site: Site, ids: dict[str, str]) -> Iterator[Visitor]:
    del ids
    site.kit.dispatcher.statuses = [worker_status()]
    yield site.visitor("ann")
    site.kit.dispatcher.statuses = []


def test_shares_add_up_and_are_judged_by_weight(site: Site, ids: dict[str, str]) -> None:
    found = fair_shares(site.operator, {ids["light"]: 4, ids["quiet"]: 1}, {ids["quiet"]: 0.49})
    lines = {line.name: line for line in found.lines}
    assert [line.name for line in found.lines] == ["heavy", "light", "quiet"]
    assert sum(line.got for line in found.lines) == pytest.approx(1.0)
    assert sum(line.due for line in found.lines) == pytest.approx(1.0)
    assert lines["heavy"].got == pytest.approx(0.8)
    assert lines["quiet"].due == pytest.approx(0.5)
    assert lines["heavy"].standing == "over"
    assert lines["light"].standing == "under", "it waits and has less than its share"
    assert lines["quiet"].standing == "asks for less", "one that waits for a moment is no fault"
    assert lines["quiet"].num_ended == 10, "old postings and cached answers are no service"
    assert lines["light"].wait_p50_s == pytest.approx(15.0)
    assert lines["light"].wait_p99_s == pytest.approx(30.0)


def test_who_only_waits_is_listed_too(site: Site, ids: dict[str, str]) -> None:
    fresh = site.write(tenants.create_tenant, "fresh", now_at=site.operator.clock())
    found = fair_shares(site.operator, {fresh.id: 7, ids["quiet"]: 0}, {fresh.id: 6.0})
    line = next(line for line in found.lines if line.name == "fresh")
    assert (line.num_waiting, line.num_ended, line.wait_p99_s) == (7, 0, None)
    assert line.standing == "under"


@pytest.mark.parametrize(
    ("part", "found"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_quantiles(part: float, found: float) -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], part) == found
    assert quantile([], part) is None


def test_the_page_says_all_of_it(site: Site, ann: Visitor) -> None:
    metrics = site.kit.edge.metrics
    metrics.limit_rejections.labels("requests_per_minute").inc(3)
    site.kit.dispatcher.statuses[0].counters["num_preemptions"] = 5.0
    text = ann.get("/fairness").text
    assert "heavy: received 80.0% of the service" in text
    assert "limit: requests per minute" in text
    assert re.search(r"Preemptions</dt><dd>5<", text)
    assert re.search(r'Running" class="number">2<', text)
    assert "polyhost why" in text, "one waits, and nobody listens on the operator's socket here"


def test_nobody_listens_on_the_socket_of_a_site_of_tests(site: Site) -> None:
    assert not operator_socket(site.operator.settings.data_path).exists()
    with pytest.raises(RegistryError):
        ask(site.operator.settings.data_path, ask="why")


def test_it_is_of_all_tenants_so_for_those_who_see_all(site: Site, ann: Visitor) -> None:
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "heavy")
    assert site.visitor("vera").get("/fairness").status == 200
    tom = site.visitor("tom")
    assert tom.get("/fairness").status == 403
    assert tom.get("/live/fairness").status == 401
    assert "/admin/fairness" not in tom.get("/account").text
    theirs = acting_as(site.operator, site.read(users.get_user, "tom"))
    with pytest.raises(Forbidden):
        fair_shares(theirs, {}, {})
