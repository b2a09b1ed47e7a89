"""Who asks for which model, where a trace does not say: popularity by Zipf, tenants with habits.

Lives here: the shares of tenants and models and the draw of both for a batch. Does not: times,
lengths, patterns.

Tenants and models share the interval [0, 1). A model owns a stretch as long as its popularity; a
tenant owns some short stretches that add up to its share, thrown about at random. With probability
`affinity` a request's tenant and model are two owners of one point, else two draws apart. So a
tenant keeps coming back to the few models that lie under its stretches, while the shares of models
and of tenants over all requests stay exactly as they were set (drawing a tenant's favourites at
random instead would let the largest tenant's taste decide what is popular).
"""

from dataclasses import dataclass, replace

import numpy as np

from bench.sim.batches import UNKNOWN, Batch, Floats, Ints, Keys, rng, uniform

MOST_ZIPF = 20.0


@dataclass(frozen=True, slots=True)
class Habits:
    """How demand is spread.

    tenant_zipf   exponent: the k-th tenant's share goes with 1/k^exponent
    top_share     of the requests that the busiest 20 % of the models take
    affinity      share of a tenant's requests that go to models it prefers
    preferred     stretches of a tenant: about as many models does it prefer
    """

    tenant_zipf: float = 1.0
    top_share: float = 0.8
    affinity: float = 0.8
    preferred: int = 3


def zipf(number: int, exponent: float) -> Floats:
    """Shares of `number` ranks, the largest first."""
    shares = np.arange(1, number + 1, dtype=np.float64) ** -exponent
    return np.asarray(shares / shares.sum())


def zipf_for(number: int, top_share: float, top_part: float = 0.2) -> Floats:
    """Zipf shares in which the first `top_part` of the ranks (one at least) take `top_share`.

    All are equal where even equal shares give the top that much.
    """
    num_top = max(1, round(number * top_part))
    if num_top >= number or num_top / number >= top_share:
        return zipf(number, 0.0)
    low, high = 0.0, MOST_ZIPF
    for _ in range(60):
        middle = (low + high) / 2
        if zipf(number, middle)[:num_top].sum() < top_share:
            low = middle
        else:
            high = middle
    return zipf(number, high)


class Cast:
    """Shares by place in the world's lists. Which place is how popular is drawn by the seed."""

    def __init__(self, num_tenants: int, num_models: int, seed: int, habits: Habits) -> None:
        if num_tenants < 1 or num_models < 1:
            raise ValueError("a workload needs a tenant and a model")
        self._seed = seed
        self._habits = habits
        self.tenant_shares = _shuffled(zipf(num_tenants, habits.tenant_zipf), seed, "tenant ranks")
        self.model_shares = _shuffled(zipf_for(num_models, habits.top_share), seed, "model ranks")
        self._tenant_ends = _ends(self.tenant_shares)
        self._model_ends = _ends(self.model_shares)
        # Stretches in the order in which they lie; a tenant's are found through _place_of.
        each = max(1, habits.preferred)
        order = rng(seed, "stretches").permutation(num_tenants * each)
        self._stretch_owner = order // each
        self._stretch_share = self.tenant_shares[self._stretch_owner] / each
        self._stretch_ends = _ends(self._stretch_share)
        self._place_of = np.argsort(order)
        self._each = each

    def fill(self, batch: Batch) -> Batch:
        """Draw the tenants and models that the batch does not know; the same for one group."""
        u = {
            name: uniform(batch.group, self._seed, name)
            for name in ("tenant", "model", "habit", "which", "where")
        }
        habit = u["habit"] < self._habits.affinity
        knows_model = batch.model != UNKNOWN
        # The tenant: of a known model by habit its stretches' owner, else by share.
        point = self._point_in_model(batch.model, u["where"])
        by_habit = self._stretch_owner[_find(self._stretch_ends, point)]
        by_share = _find(self._tenant_ends, u["tenant"])
        drawn = np.where(knows_model & habit, by_habit, by_share)
        tenant = np.where(batch.tenant == UNKNOWN, drawn, batch.tenant)
        # The model: by habit under one of the tenant's stretches, else by share.
        point = np.where(habit, self._point_in_tenant(tenant, u["which"], u["where"]), u["model"])
        model = np.where(knows_model, batch.model, _find(self._model_ends, point))
        return replace(batch, tenant=tenant.astype(np.int64), model=model.astype(np.int64))

    def models_for(self, tenant: int, keys: Keys) -> Ints:
        """Models that one tenant asks for, a draw for each key."""
        batch = np.full(len(keys), tenant, np.int64)
        habit = uniform(keys, self._seed, "habit") < self._habits.affinity
        which = uniform(keys, self._seed, "which")
        where = uniform(keys, self._seed, "where")
        free = uniform(keys, self._seed, "model")
        point = np.where(habit, self._point_in_tenant(batch, which, where), free)
        return _find(self._model_ends, point)

    def unpopular_models(self) -> Ints:
        """The less popular half (one at least), the least popular first."""
        order = np.argsort(self.model_shares, kind="stable")
        return order[: max(1, len(order) // 2)]

    def cast_labels(self, num_labels: int, what: str, copy: int) -> Ints:
        """Places for a trace's own tenants or models, given in order of their popularity there.

        The more popular a place, the sooner it is taken; every copy of a trace has its own cast.
        More labels than places: the rest takes them again from the first.
        """
        shares = self.tenant_shares if what == "tenant" else self.model_shares
        places = np.arange(len(shares), dtype=np.uint64)
        # Gumbel's trick: sorting log(share) + noise draws without replacement in proportion.
        noise = -np.log(-np.log(np.maximum(uniform(places, self._seed, what, copy), 1e-300)))
        order = np.argsort(-(np.log(shares) + noise), kind="stable")
        return order[np.arange(num_labels) % len(order)]

    def _point_in_model(self, model: Ints, where: Floats) -> Floats:
        known = np.maximum(model, 0)
        return self._model_ends[known] - self.model_shares[known] * (1.0 - where)

    def _point_in_tenant(self, tenant: Ints, which: Floats, where: Floats) -> Floats:
        stretch = self._place_of[tenant * self._each + (which * self._each).astype(np.int64)]
        return self._stretch_ends[stretch] - self._stretch_share[stretch] * (1.0 - where)


def _shuffled(shares: Floats, seed: int, what: str) -> Floats:
    return np.asarray(rng(seed, what).permutation(shares))


def _ends(shares: Floats) -> Floats:
    return np.asarray(np.cumsum(shares))


def _find(ends: Floats, points: Floats) -> Ints:
    return np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1).astype(np.int64)
