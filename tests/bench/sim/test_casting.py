"""Who asks for what: shares, habits, conversations that stay together, a trace's own labels."""

import numpy as np
import pytest

from bench.sim.batches import Batch, fresh, keys_of
from bench.sim.casting import Cast, Habits, zipf, zipf_for

NUM = 200_000


def some_batch(number: int = NUM) -> Batch:
    """Rows at one moment that belong to nobody."""
    ones = np.ones(number, np.int64)
    return fresh(np.zeros(number), ones, ones, keys_of(number, "test"))


@pytest.mark.parametrize(("number", "top"), [(5, 1), (20, 4), (500, 100)])
def test_a_fifth_of_the_models_takes_the_share(number: int, top: int) -> None:
    shares = zipf_for(number, 0.8)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[:top].sum() == pytest.approx(0.8, abs=1e-6)
    assert (np.diff(shares) <= 0).all()


@pytest.mark.parametrize(("number", "share"), [(1, 0.8), (1, 0.0), (10, 0.1)])
def test_equal_where_the_top_has_that_much_anyway(number: int, share: float) -> None:
    assert zipf_for(number, share) == pytest.approx(np.full(number, 1 / number))


@pytest.mark.parametrize("affinity", [0.0, 0.8, 1.0])
def test_shares_hold_whatever_the_habits(affinity: float) -> None:
    cast = Cast(30, 20, 7, Habits(affinity=affinity))
    filled = cast.fill(some_batch())
    of_models = np.bincount(filled.model, minlength=20) / NUM
    of_tenants = np.bincount(filled.tenant, minlength=30) / NUM
    # Four deviations of a share estimated from so many draws.
    assert of_models == pytest.approx(cast.model_shares, abs=4 * 0.5 / NUM**0.5)
    assert of_tenants == pytest.approx(cast.tenant_shares, abs=4 * 0.5 / NUM**0.5)
    assert np.sort(of_models)[-4:].sum() == pytest.approx(0.8, abs=0.01)
    assert np.sort(cast.tenant_shares) == pytest.approx(np.sort(zipf(30, 1.0)))


def test_tenants_come_back_to_the_models_they_prefer() -> None:
    def favourite_share(affinity: float) -> float:
        cast = Cast(100, 200, 3, Habits(affinity=affinity, preferred=3, top_share=0.2))
        filled = cast.fill(some_batch())
        counts = np.zeros((100, 200))
        np.add.at(counts, (filled.tenant, filled.model), 1)
        small = np.argsort(cast.tenant_shares)[:50]
        return float(np.sort(counts[small], axis=1)[:, -6:].sum() / counts[small].sum())

    assert favourite_share(0.8) > 0.75
    assert favourite_share(0.0) < 0.25


def test_a_conversation_keeps_its_tenant_and_model() -> None:
    batch = some_batch(4000)
    batch.group = keys_of(1000, "talk").repeat(4)
    filled = Cast(50, 40, 1, Habits()).fill(batch)
    for column in (filled.tenant, filled.model):
        assert (column.reshape(-1, 4) == column[::4, None]).all()
        assert len(set(column.tolist())) > 10


def test_what_the_trace_knows_is_kept_and_the_other_is_drawn_for_it() -> None:
    cast = Cast(40, 10, 5, Habits(affinity=1.0, preferred=1))
    batch = some_batch(20_000)
    batch.model = np.arange(20_000) % 10
    filled = cast.fill(batch)
    assert (filled.model == batch.model).all()
    again = some_batch(20_000)
    again.tenant = filled.tenant
    # A tenant with one stretch meets only the models under it, from whichever side it is asked.
    pairs = set(zip(filled.tenant.tolist(), filled.model.tolist(), strict=True))
    back = cast.fill(again)
    assert set(zip(back.tenant.tolist(), back.model.tolist(), strict=True)) <= pairs


def test_popular_labels_go_to_popular_places() -> None:
    cast = Cast(3, 100, 0, Habits())
    casts = np.array([cast.cast_labels(30, "model", copy) for copy in range(300)])
    assert all(len(set(row)) == 30 for row in casts.tolist())
    mean_share = cast.model_shares[casts].mean(axis=0)
    assert mean_share[0] > 2 * mean_share[10] > 2 * mean_share[29]
    assert len({tuple(row) for row in casts.tolist()}) > 290


def test_more_labels_than_places_share_them() -> None:
    labels = Cast(3, 4, 0, Habits()).cast_labels(10, "model", 0)
    assert sorted(np.bincount(labels).tolist()) == [2, 2, 3, 3]


def test_the_seed_says_all() -> None:
    def drawn(seed: int) -> list[int]:
        return list(Cast(30, 20, seed, Habits()).fill(some_batch(500)).model)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_world_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="a tenant and a model"):
        Cast(0, 1, 0, Habits())
