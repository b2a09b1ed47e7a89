"""Whose job is next: shares of time by tenant, whatever they send."""

from gateway.text.prepare_turns import MAX_TENANTS, PrepareTurns


def work(turns: PrepareTurns, tenants: dict[str, float], seconds: float) -> dict[str, float]:
    """What each had of one process's time. Everyone has a backlog of jobs of so many seconds."""
    had, now_s = dict.fromkeys(tenants, 0.0), 0.0
    while now_s < seconds:
        name = min(tenants, key=lambda name: turns.charged_s(name, now_s))
        turns.begin(name, now_s)
        now_s += tenants[name]
        had[name] += tenants[name]
        turns.end(name, now_s)
    return had


def test_slow_and_quick_jobs_share_the_time() -> None:
    had = work(PrepareTurns(), {"slow": 1.0, "quick": 0.01, "other": 0.01}, 90.0)
    assert all(29.0 < seconds < 31.5 for seconds in had.values())


def test_who_comes_waits_for_no_backlog_and_gets_nothing_for_having_been_away() -> None:
    turns = PrepareTurns()
    work(turns, {"slow": 1.0}, 50.0)
    assert turns.charged_s("new", 50.0) < turns.charged_s("slow", 50.0)
    had = work(turns, {"slow": 1.0, "new": 1.0}, 20.0)
    assert abs(had["slow"] - had["new"]) <= 2.0


def test_what_runs_counts_while_it_runs() -> None:
    turns = PrepareTurns()
    turns.begin("a", 100.0)
    turns.begin("a", 101.0)
    assert turns.charged_s("a", 103.0) == 5.0
    assert turns.charged_s("b", 103.0) < 5.0
    turns.end("a", 103.0)
    turns.end("a", 104.0)
    assert turns.charged_s("a", 200.0) == 6.0


def test_it_is_bounded() -> None:
    turns = PrepareTurns()
    turns.begin("at work", 0.0)
    for number in range(3 * MAX_TENANTS):
        turns.begin(str(number), 0.0)
        turns.end(str(number), 1.0)
    assert len(turns._charged_s) <= MAX_TENANTS + 1
    assert turns.charged_s("at work", 9.0) == 9.0
    turns.clear()
    assert turns.charged_s("at work", 9.0) == 0.0
