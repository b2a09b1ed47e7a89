"""Class batch in the scheduler: it has what others leave, and gives it back within a step."""

import random

import pytest

from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.scheduling.policy.batching import FEWEST_TOKENS
from tests.engine.scheduling.test_scheduler import World


def add(
    world: World, name: str, model: str, prompt: int, new: int, tenant: str = "t", *, batch: bool
) -> Request:
    """A request of either class."""
    tokens, greedy = [len(name)] * prompt, SamplingParams(0.0)
    submit = Submit(name, 1, tenant, model, tokens, new, greedy, [], is_batch=batch)
    request = Request.of(submit, 0.0)
    world.scheduler.add(request)
    return request


def names(world: World) -> list[str]:
    """Whose rows the next step has, in order."""
    planned = world.play()
    return [] if planned is None else [row.request.submit.request_id for row in planned[1]]


def history(seed: int, *, with_batch: bool) -> dict[str, tuple[int, int]]:
    """By request of another class: the step of its first token, and of its last."""
    rng, batch_rng = random.Random(seed), random.Random(-seed)
    world = World(caching=False, max_num_seqs=rng.choice((2, 4, 8)))
    live: dict[str, Request] = {}
    firsts: dict[str, int] = {}
    lasts: dict[str, int] = {}
    num_batch = 0
    for step in range(1500):
        if len(live) < 25 and rng.random() < 0.06:
            name, tenant = f"live{len(live)}", rng.choice("tuv")
            size, new = rng.randint(1, 40), rng.randint(1, 20)
            live[name] = add(world, name, rng.choice("ab"), size, new, tenant, batch=False)
        if with_batch and world.scheduler.num_batch < 6:
            num_batch += 1
            size, new = batch_rng.randint(1, 40), batch_rng.randint(1, 30)
            about = (batch_rng.choice("ab"), size, new, batch_rng.choice("tuw"))
            add(world, f"batch{num_batch}", *about, batch=True)
        world.play()
        for name, request in live.items():
            if request.num_generated:
                firsts.setdefault(name, step)
            if request.state == "finished":
                lasts.setdefault(name, step)
    ended = [r.submit.request_id for r in world.finished if r.is_batch]
    assert len(ended) > 50 or not with_batch  # and they do get on
    world.end()
    return {name: (firsts[name], lasts[name]) for name in live}


@pytest.mark.parametrize("seed", range(8))
def test_no_token_of_others_comes_more_than_a_step_later_than_without(seed: int) -> None:
    """A step: where two models take turns, whose turn was cut short may differ."""
    with_batch, without = history(seed, with_batch=True), history(seed, with_batch=False)
    late = [
        had - has
        for name, steps in with_batch.items()
        for had, has in zip(steps, without[name], strict=True)
    ]
    assert max(late) <= 1
    assert late.count(0) > len(late) / 2


def test_the_first_to_come_has_the_step_and_its_row_comes_from_class_batch() -> None:
    world = World(max_num_seqs=2)
    for number in range(2):
        add(world, f"batch{number}", "a", 4, 30, batch=True)
    assert names(world) == ["batch0", "batch1"]
    add(world, "live", "a", 6, 8, batch=False)
    assert names(world) == ["live"]  # a step of its own, where its prompt is computed
    assert names(world) == ["live", "batch0"]  # and the other sits out, with its KV
    queue = world.scheduler.queue("a")
    assert [request.num_preemptions for request in queue.running] == [0, 0, 0]
    add(world, "also", "a", 6, 8, batch=False)
    assert names(world) == ["live", "also"]


def test_memory_comes_from_the_youngest_of_class_batch_within_the_step() -> None:
    world = World()
    batch = [add(world, f"batch{n}", "b", 40, 30, "t", batch=True) for n in range(4)]
    for _ in range(12):
        world.play()
    running = [request for request in batch if request.state == "running"]
    assert len(running) > 1
    add(world, "live", "a", 60, 20, "u", batch=False)
    assert names(world) == ["live"]
    lost = [request.submit.request_id for request in running if request.state == "waiting"]
    assert lost == [r.submit.request_id for r in running][-len(lost) :]
    world.end()


def test_a_model_with_nothing_else_waits_for_all_that_others_have() -> None:
    world = World()
    add(world, "batch", "b", 8, 10, batch=True)
    live = add(world, "live", "a", 30, 12, batch=False)
    while live.state != "finished":
        assert names(world) == ["live"]
    assert names(world) == ["batch"]
    world.end()


def test_its_prompts_are_cut_to_the_length_of_a_step() -> None:
    world = World(max_batch_tokens=100)
    pace = world.scheduler.queue("a").batch_pace
    pace.observe(0.2, 40, 40)  # 5 ms a token: a step of 25 ms has the fewest
    request = add(world, "batch", "a", 80, 4, batch=True)
    world.play()
    assert request.num_computed == FEWEST_TOKENS
    world.end()


def test_pages_for_a_load_come_from_class_batch_and_are_left_alone() -> None:
    world = World()
    for number in range(4):
        add(world, f"batch{number}", "b", 40, 30, batch=True)
    for _ in range(12):
        world.play()
    kv, wanted = world.kv, 20
    assert kv.num_obtainable < wanted
    world.scheduler.leave_to_load(wanted, world.now_s)
    assert kv.num_obtainable >= wanted
    for _ in range(5):
        world.play()
        assert kv.num_obtainable >= wanted
    world.scheduler.leave_to_load(0, world.now_s)
    world.end()


def test_it_ends_by_its_own_time_alone() -> None:
    submit = Submit("r", 1, "t", "a", [1], 4, SamplingParams(0.0), [], timeout_s=86_400.0)
    assert Request.of(submit, 0.0, timeout_s=600.0).deadline_s == 600.0
    line = Submit(
        "r", 1, "t", "a", [1], 4, SamplingParams(0.0), [], timeout_s=86_400.0, is_batch=True
    )
    assert Request.of(line, 0.0, timeout_s=600.0).deadline_s == 86_400.0
