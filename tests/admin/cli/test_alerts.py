"""`polyhost alerts` over a real data folder."""

import json

import pytest

from admin.alerts import webhook
from tests.admin.cli.conftest import Run

URL = "https://example.com/hook"


@pytest.fixture(autouse=True)
def _tenant(run: Run) -> None:
    run("tenants", "add", "acme")


def test_an_alert_is_added_shown_and_removed(run: Run) -> None:
    made = json.loads(
        run(
            *("alerts", "add", "--tenant", "acme", "--month", "--sum", "50"),
            *("--at", "80,50", "--webhook", URL, "--json"),
        )
    )
    assert made["secret"].startswith("whsec_")
    assert (made["budget_nanos"], made["percents"], made["name"]) == (50 * 10**9, [50, 80], "acme")
    (shown,) = json.loads(run("alerts", "list", "--json"))
    assert shown["id"] == made["id"]
    assert "secret" not in shown
    listed = run("alerts", "list")
    assert "50.000000000 (soft)" in listed
    assert "50,80" in listed
    assert run("alerts", "log").count("\n") <= 1
    run("alerts", "rm", made["id"])
    assert json.loads(run("alerts", "list", "--json")) == []


def test_what_makes_no_sense(run: Run) -> None:
    assert "whole percentages" in run(
        *("alerts", "add", "--gateway", "--day", "--webhook", URL, "--at", "half"), status=2
    )
    assert "http" in run("alerts", "add", "--gateway", "--day", "--webhook", "x", status=2)
    assert "unknown alert" in run("alerts", "rm", "alr_x", status=1)
    assert "limit" in run("alerts", "log", "--limit", "0", status=2)


def test_a_test_message_is_sent_and_failure_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[bytes]()

    async def deliver(url: str, alert_id: str, secret: str, body: bytes, now_at: float) -> None:
        sent.append(body)
        if len(sent) > 1:
            raise webhook.NotDelivered("answered with status 500")

    monkeypatch.setattr(webhook, "deliver", deliver)
    run("limits", "set", "--gateway", "--budget-day", "10")
    made = json.loads(run("alerts", "add", "--gateway", "--day", "--webhook", URL, "--json"))
    run("alerts", "test", made["id"])
    told = json.loads(sent[0])
    assert (told["percent"], told["spent_nanos"], told["budget_nanos"]) == (50, 5e9, 10e9)
    assert "answered with status 500" in run("alerts", "test", made["id"], status=1)
    assert json.loads(run("alerts", "log", "--json")) == []
