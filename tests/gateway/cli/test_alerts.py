"""`polyhost alerts` over a real data folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.alerts import webhook
from gateway.cli.main import main
from gateway.service import alerts as service_alerts

Run = Callable[..., str]
URL = "https://example.com/hook"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 0) -> str:
        assert main([*arguments, "--data-dir", str(tmp_path / "data")]) == status
        out, err = capsys.readouterr()
        return err if status else out

    run("tenants", "add", "acme")
    return run


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
    assert "percents" in run(
        *("alerts", "add", "--gateway", "--day", "--webhook", URL, "--at", "half"), status=2
    )
    assert "http" in run("alerts", "add", "--gateway", "--day", "--webhook", "x", status=2)
    assert "no alert" in run("alerts", "rm", "alr_x", status=1)
    assert "limit" in run("alerts", "log", "--limit", "0", status=2)


def test_a_test_message_is_sent_and_failure_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[bytes]()

    async def deliver(url: str, alert_id: str, secret: str, body: bytes, now_at: float) -> None:
        sent.append(body)
        if len(sent) > 1:
            raise webhook.NotDelivered("the answer was 500")

    monkeypatch.setattr(service_alerts.send_test, "__defaults__", (deliver,))
    run("limits", "set", "--gateway", "--budget-day", "10")
    made = json.loads(run("alerts", "add", "--gateway", "--day", "--webhook", URL, "--json"))
    run("alerts", "test", made["id"])
    told = json.loads(sent[0])
    assert (told["percent"], told["spent_nanos"], told["budget_nanos"]) == (50, 5e9, 10e9)
    assert "the answer was 500" in run("alerts", "test", made["id"], status=1)
    assert json.loads(run("alerts", "log", "--json")) == []
