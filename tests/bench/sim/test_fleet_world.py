"""Fleet mode repeats exactly, and its clients are heard to their end."""

from bench.sim.fleet_world import Ask, FleetWorld, percentile

GIB = 1 << 30


def ran(seed: int) -> FleetWorld:
    world = FleetWorld(3, {f"m{n}": 20 * GIB for n in range(8)}, seed=seed)
    rng = world.rng

    def draw() -> Ask:
        return Ask(rng.randrange(4), f"m{rng.randrange(8)}", 64, rng.randrange(5, 80))

    for _ in range(20):
        world.keep_asking(draw, until_s=40.0, pause_s=0.5)
    world.loop.run(60.0)
    return world


def test_a_run_repeats_exactly() -> None:
    one, again, other = ran(1), ran(1), ran(2)
    assert one.seen == again.seen
    assert one.seen != other.seen


def test_every_client_is_through_when_time_is_up() -> None:
    world = ran(3)
    snapshot = world.dispatcher.snapshot()
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
    assert sum(world.seen.ended.values()) > 100
    assert max(map(world.copies, (f"m{n}" for n in range(8)))) >= 1
    world.dispatcher.check_integrity()


def test_percentiles() -> None:
    assert percentile([], 0.5) != percentile([], 0.5)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
