"""Open after a break or late answers in a row; probed ever more rarely; closed by an answer."""

from gateway.store.breaker import Breaker


def test_a_broken_connection_opens_at_once() -> None:
    breaker = Breaker()
    assert breaker.failed(10.0, is_late=False)
    assert breaker.is_open
    assert not breaker.failed(10.0, is_late=False)  # told once
    assert breaker.probe_at_s == 10.1


def test_late_answers_open_in_a_row_only() -> None:
    breaker = Breaker()
    assert [breaker.failed(1.0, is_late=True) for _ in range(2)] == [False, False]
    breaker.succeeded()
    told = [breaker.failed(1.0, is_late=True) for _ in range(3)]
    assert told == [False, False, True]


def test_probes_get_rarer_up_to_a_second() -> None:
    breaker = Breaker()
    breaker.failed(0.0, is_late=False)
    waits = []
    for _ in range(6):
        now_s = breaker.probe_at_s
        breaker.probe_failed(now_s)
        waits.append(round(breaker.probe_at_s - now_s, 3))
    assert waits == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    breaker.succeeded()
    assert not breaker.is_open
    breaker.failed(0.0, is_late=False)
    assert breaker.probe_at_s == 0.1
