"""Rules, and what was raised of them: once each, claimed by one, told or given up."""

import pytest
from sqlalchemy import Engine

from registry import audit
from registry.errors import InvalidValue, NotFound
from registry.money import alerts
from registry.money.alerts import Alert, AlertRule
from registry.session import appending, reading, writing

URL = "https://example.com/hook"


def new_rule(engine: Engine, url: str = URL) -> tuple[AlertRule, str]:
    with writing(engine, "test") as session:
        return alerts.add_rule(
            session, "tenant", "ten_1", "month", 100, [80, 50, 80], url, now_at=5.0
        )


def alert(rule: AlertRule, percent: int, name: str = "a", at: float = 10.0) -> Alert:
    return Alert(f"alt_{name}", rule.id, 7, percent, "{}", at, at)


def test_a_rule_comes_and_goes_with_what_it_raised(engine: Engine) -> None:
    rule, secret = new_rule(engine)
    assert rule.percents == (50, 80)
    with appending(engine, "test") as session:
        alerts.raise_alerts(session, [alert(rule, 50)])
    with reading(engine) as session:
        assert alerts.list_rules(session) == [rule]
        assert alerts.get_rule(session, rule.id) == rule
        assert alerts.secret_of(session, rule.id) == secret
        entry = audit.latest(session)[0]
        assert entry.action == "alert.add"
        assert secret not in str(entry)
        assert "example.com" in str(entry)
        assert "hook" not in str(entry)  # what many receivers keep secret
    with writing(engine, "test") as session:
        alerts.remove_rule(session, rule.id, now_at=6.0)
    with reading(engine) as session:
        assert not alerts.list_rules(session)
        assert not alerts.list_alerts(session, 10)
        with pytest.raises(NotFound):
            alerts.get_rule(session, rule.id)


def test_a_threshold_is_raised_once_a_period(engine: Engine) -> None:
    rule, _ = new_rule(engine)
    with appending(engine, "test") as session:
        assert alerts.raise_alerts(session, [alert(rule, 50)]) == 1
    with appending(engine, "test") as session:
        assert alerts.raise_alerts(session, [alert(rule, 50, "b"), alert(rule, 80, "c")]) == 1
    with reading(engine) as session:
        assert alerts.raised(session, [7]) == {(rule.id, 7, 50), (rule.id, 7, 80)}
        assert alerts.raised(session, [8]) == set()
        assert {found.id for found in alerts.list_alerts(session, 10)} == {"alt_a", "alt_c"}


def test_who_claims_an_alert_has_it_alone_for_a_while(engine: Engine) -> None:
    rule, secret = new_rule(engine)
    with appending(engine, "test") as session:
        alerts.raise_alerts(session, [alert(rule, 50), alert(rule, 80, "b", 500.0)])
    with appending(engine, "test") as session:
        (mine,) = alerts.claim(session, 20.0, 80.0, 10)
    assert (mine.alert.id, mine.url, mine.secret) == ("alt_a", URL, secret)
    with appending(engine, "test") as session:
        assert alerts.claim(session, 21.0, 81.0, 10) == []
    with appending(engine, "test") as session:  # whoever had it died
        assert len(alerts.claim(session, 90.0, 150.0, 10)) == 1
        alerts.failed(session, "alt_a", "x" * 999, 200.0)
    with appending(engine, "test") as session:
        assert alerts.num_waiting(session) == 2
        alerts.delivered(session, "alt_a", now_at=201.0)
        alerts.failed(session, "alt_b", "no", None)
    with reading(engine) as session:
        later, told = alerts.list_alerts(session, 10)
        assert (told.delivered_at, told.num_tries, told.last_error) == (201.0, 2, "")
        assert (later.delivered_at, later.next_try_at, later.last_error) == (None, None, "no")
        assert alerts.num_waiting(session) == 0


@pytest.mark.parametrize(
    "address",
    [
        "ftp://example.com",
        "example.com/hook",
        "http://",
        "http://user:secret@example.com/",
        "http://example.com/#part",
        "http://example.com/a b",
        "http://example.com/\r\nx: y",
        "http://example.com:99999/",
        "http://[::1/",
        "http://" + "a" * 3000,
    ],
)
def test_what_is_no_webhook(engine: Engine, address: str) -> None:
    with pytest.raises(InvalidValue):
        new_rule(engine, address)


@pytest.mark.parametrize("percents", [[], [0], [1001], list(range(1, 12))])
def test_percents_are_bounded(engine: Engine, percents: list[int]) -> None:
    with writing(engine, "test") as session, pytest.raises(InvalidValue):
        alerts.add_rule(session, "gateway", "", "day", 0, percents, URL, now_at=0.0)
