"""Lists of models and tenants, and the figures of devices."""

from collections import Counter

import pytest

from bench import shapes
from bench.sim.devices import DEVICES
from bench.sim.worlds import MIXES, WEIGHTS, make_models, make_tenants


@pytest.mark.parametrize("mix", list(MIXES))
def test_models_have_the_mixs_shares(mix: str) -> None:
    models = make_models(50, 3, mix)
    counts = Counter(model.shape for model in models)
    for shape, share in MIXES[mix].items():
        assert abs(counts[shape] - 50 * share) <= 1
    assert sum(counts.values()) == len({model.name for model in models}) == 50
    assert set(counts) <= set(shapes.read_shapes())


def test_order_is_by_the_seed() -> None:
    assert make_models(40, 1) == make_models(40, 1)
    assert make_models(40, 1) != make_models(40, 2)
    assert make_tenants(40, 1, "tiers") != make_tenants(40, 2, "tiers")


def test_tenants_have_weights() -> None:
    assert {tenant.weight for tenant in make_tenants(7)} == {1.0}
    counts = Counter(tenant.weight for tenant in make_tenants(100, 0, "tiers"))
    assert counts == {weight: 100 * share for weight, share in WEIGHTS["tiers"].items()}
    assert {tenant.weight for tenant in make_tenants(4, 0, {3.0: 1, 5.0: 1})} == {3.0, 5.0}


def test_what_is_not_known_is_told() -> None:
    with pytest.raises(ValueError, match="one of tiny, small"):
        make_models(3, 0, "huge")
    with pytest.raises(ValueError, match="no such shape: some/model"):
        make_models(3, 0, {"some/model": 1.0})


def test_every_device_names_its_source_and_holds_a_model() -> None:
    assert set(DEVICES) == {"h200", "h100", "a100-80g", "l4", "cpu-2"}
    for name, device in DEVICES.items():
        assert device.name == name
        assert "data sheet" in device.source or "bench/results" in device.source
        assert device.memory_bytes > 2 * 494_000_000
        assert device.disk_bytes_per_s < device.host_bytes_per_s
        assert device.host_bytes_per_s < 1.2 * device.memory_bytes_per_s
    assert DEVICES["l4"].memory_bytes_per_s < DEVICES["h100"].memory_bytes_per_s
