"""What one of several gateways may grant by itself."""

from dataclasses import replace

from gateway.limits.policy.rate_limit import UNKNOWN_RETRY_S, Draw, LimitFigures, Refusal
from gateway.limits.shares import MAX_KEPT, Shares, refusal_of

MINUTE = Draw("m", "tokens", 60, 100, 10)


def figures(used: int, limit: int = 100) -> LimitFigures:
    return LimitFigures(limit, limit - used, 0.0)


def test_a_share_is_its_part_and_lets_one_request_through() -> None:
    shares = Shares(4)
    assert shares.of(MINUTE, 0.0).limit == 25
    assert shares.of(replace(MINUTE, cost=80), 0.0).limit == 80
    assert shares.of(replace(MINUTE, cost=101), 0.0).limit == 100
    assert shares.of(replace(MINUTE, window_s=0, limit=3, cost=1), 0.0).limit == 1
    shares.num_gateways = 1
    assert shares.of(MINUTE, 0.0).limit == 100


def test_what_redis_said_last_holds_for_a_window_of_the_same_limit() -> None:
    shares = Shares(2)
    for used, here, most in ((100, 7, 7), (90, 7, 12), (20, 20, 50), (0, 0, 50)):
        shares.note([MINUTE], [figures(used)], [figures(here)], now_s=5.0)
        assert shares.of(MINUTE, 64.0).limit == most
    shares.note([MINUTE], [figures(100)], [figures(0)], now_s=5.0)
    assert shares.of(replace(MINUTE, cost=80), 64.0).limit == 0
    assert shares.of(MINUTE, 65.0).limit == 50
    assert shares.of(replace(MINUTE, limit=120), 6.0).limit == 60
    assert shares.of(replace(MINUTE, name="other"), 6.0).limit == 50


def test_places_and_money_go_by_the_share_alone() -> None:
    shares = Shares(2)
    places = replace(MINUTE, meter="concurrency", window_s=0, cost=1)
    shares.note([places], [figures(100)], [figures(0)], now_s=5.0)
    assert shares.of(places, 5.0).limit == 50
    assert shares.of(replace(places, meter="cost"), 5.0).limit > 10**18


def test_what_is_kept_is_bounded() -> None:
    shares = Shares(2)
    draws = [replace(MINUTE, name=f"m{number}") for number in range(MAX_KEPT + 1)]
    shares.note(draws, [figures(100)] * len(draws), [figures(0)] * len(draws), now_s=5.0)
    assert shares.of(draws[0], 5.0).limit == 50
    assert shares.of(draws[1], 5.0).limit == 0


def test_what_fits_the_whole_limit_is_not_refused_for_ever() -> None:
    refused = Refusal(replace(MINUTE, limit=0), 7, None)
    assert refusal_of(MINUTE, refused) == Refusal(MINUTE, 7, UNKNOWN_RETRY_S)
    large = replace(MINUTE, cost=101)
    assert refusal_of(large, refused) == Refusal(large, 7, None)
    assert refusal_of(MINUTE, replace(refused, wait_s=3.0)).wait_s == 3.0
