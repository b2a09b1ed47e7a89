"""What headers say of the cache."""

import pytest

from gateway.cache.asks import NO_WISH, wish_of
from gateway.errors import ApiError
from gateway.policy.cache_rule import CacheWish


def wish(has_embedder: bool = True, **headers: str) -> CacheWish:
    return wish_of({k.replace("_", "-"): v for k, v in headers.items()}, has_embedder)


def test_nothing_said_is_no_wish() -> None:
    assert wish() is NO_WISH


@pytest.mark.parametrize("mode", ["off", "exact", "semantic", "shadow"])
def test_modes(mode: str) -> None:
    assert wish(x_polyhost_cache_mode=mode).mode == mode


@pytest.mark.parametrize("mode", ["", "Exact", "on", "exact,semantic"])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(ApiError, match="must be one of off, exact, semantic, shadow"):
        wish(x_polyhost_cache_mode=mode)


def test_without_an_embedder_meanings_are_refused_with_how_to_set_one_up() -> None:
    for mode in ("semantic", "shadow"):
        with pytest.raises(ApiError, match="polyhost models add NAME") as refused:
            wish(has_embedder=False, x_polyhost_cache_mode=mode)
        assert refused.value.kind.status == 400
    assert wish(has_embedder=False, x_polyhost_cache_mode="exact").mode == "exact"


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ("max-age=60", CacheWish(max_age_s=60.0)),
        ('Max-Age="60", public', CacheWish(max_age_s=60.0)),
        ("max-age=0", CacheWish(max_age_s=0.0)),
        ("no-cache", CacheWish(reads=False)),
        ("no-store", CacheWish(reads=False, keeps=False)),
        ("no-cache, max-age=9", CacheWish(max_age_s=9.0, reads=False)),
        ("private, stale-if-error=5", CacheWish()),
        ("no-store," * 100, CacheWish()),
        ("", CacheWish()),
    ],
)
def test_cache_control(control: str, expected: CacheWish) -> None:
    assert wish(cache_control=control) == expected


@pytest.mark.parametrize("age", ["", "-1", "1.5", "x", "1" * 13, "٣"])
def test_ages_that_are_none_are_refused(age: str) -> None:
    with pytest.raises(ApiError, match="max-age must be whole seconds"):
        wish(cache_control=f"max-age={age}")


def test_sampled() -> None:
    assert wish(x_polyhost_cache_sampled="true").sampled is True
    assert wish(x_polyhost_cache_sampled="false").sampled is False
    with pytest.raises(ApiError, match="must be true or false"):
        wish(x_polyhost_cache_sampled="yes")
