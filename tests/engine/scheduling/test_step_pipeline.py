"""Steps in flight: what a request counts on, what is thrown away, what a failure takes with it."""

import pytest
import torch

from engine.errors import IntegrityError
from engine.running.batch import StepBatch
from engine.sampling.sampler import SampleOutput
from engine.scheduling.step_pipeline import SampledToken
from tests.engine.scheduling.test_scheduler import TwoTokens, World


def test_a_step_ahead_goes_on_with_tokens_nobody_knows_yet() -> None:
    world = World(ahead=1)
    request = world.add("x", "a", 4, 3)
    rows = []
    for _ in range(4):
        planned = world.play()
        rows.append(
            [(r.first, r.num_scheduled_tokens, r.source) for r in planned[1]] if planned else None
        )
    # The third token's step is the last: a fourth would compute what nobody asks for.
    assert rows == [[(0, 4, -1)], [(4, 1, 0)], [(5, 1, 0)], None]
    assert request.state == "finished"
    assert request.token_ids == [1] * 4 + [2] * 3


def test_a_preempted_request_still_gets_the_token_in_flight() -> None:
    world = World(ahead=1)
    request = world.add("x", "a", 6, 5)
    world.play()
    assert (request.num_pending, request.num_generated) == (1, 0)
    world.preempt_all("a")
    assert world.scheduler.schedule(world.now_s) is None  # it waits for that token
    world.settle()
    assert (request.num_pending, request.num_generated, request.state) == (0, 1, "waiting")
    world.end()
    assert request.num_generated == 5
    assert request.num_preemptions == 1


def test_what_a_preemption_undid_is_not_counted_as_computed() -> None:
    world = World(ahead=1, max_batch_tokens=8)
    request = world.add("x", "a", 40, 2)
    world.play()
    world.preempt_all("a")
    world.play()  # admitted anew, and the step from before the preemption is collected
    assert request.num_computed == 8
    world.end()


def test_a_failed_step_ends_its_requests_and_the_next_one_is_run_again() -> None:
    world = World(ahead=1)
    first = world.add("first", "a", 3, 9)
    queue = world.scheduler.queue("a")
    cache = queue.cache
    assert cache is not None

    class Fails(TwoTokens):
        def execute(self, batch: StepBatch) -> SampleOutput:
            raise RuntimeError("no memory")

    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    world.pipeline.launch(queue, Fails(), cache, planned[1])
    second = world.add("second", "a", 3, 9)
    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    assert [row.request for row in planned[1]] == [first, second]
    world.pipeline.launch(queue, TwoTokens(), cache, planned[1])
    failed = world.pipeline.collect()
    assert isinstance(failed.error, RuntimeError)
    world.scheduler.finish(first, "error", 0.0)
    after = world.pipeline.collect()
    assert after.abandoned
    assert (second.num_computed, second.num_pending, second.state) == (0, 0, "running")
    world.end()
    assert second.num_generated == 9


def test_a_step_that_cannot_be_laid_out_is_no_step() -> None:
    world = World(ahead=1)
    request = world.add("x", "a", 4, 5)
    queue = world.scheduler.queue("a")
    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    assert queue.cache is not None
    assert request.kv is not None
    world.scheduler.queue("b")
    tables, request.kv.tables = request.kv.tables, []
    error = world.pipeline.launch(queue, TwoTokens(), queue.cache, planned[1])
    assert isinstance(error, Exception)
    assert (world.pipeline.num_in_flight, request.num_computed, request.num_pending) == (0, 0, 0)
    request.kv.tables = tables
    world.end()


def test_tokens_of_the_step_before_are_put_into_the_batch() -> None:
    world = World(ahead=1)
    seen: list[list[int]] = []

    class Counts(TwoTokens):
        def execute(self, batch: StepBatch) -> SampleOutput:
            seen.append(batch.input_ids[0].tolist())
            size = len(batch.sampling_rows)
            return SampleOutput(
                torch.arange(size) + 10 * len(seen), torch.zeros(size, dtype=torch.bool)
            )

    world.runner = Counts()
    world.add("x", "a", 2, 3)
    world.add("y", "a", 1, 2)
    world.end()
    assert seen == [[1, 1, 1], [10, 11], [20]]


def test_a_broken_row_is_told_as_such() -> None:
    world = World()

    class Breaks(TwoTokens):
        def execute(self, batch: StepBatch) -> SampleOutput:
            return SampleOutput(torch.tensor([0, 5]), torch.tensor([True, False]))

    for name in ("x", "y"):
        world.add(name, "a", 2, 3)
    queue = world.scheduler.queue("a")
    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    assert queue.cache is not None
    world.pipeline.launch(queue, Breaks(), queue.cache, planned[1])
    tokens = (SampledToken(0, True), SampledToken(5, False))
    assert world.pipeline.collect().tokens == tokens


def test_a_broken_chunk_of_a_prompt_is_told_as_such() -> None:
    world = World(max_batch_tokens=6)

    class Breaks(TwoTokens):
        def execute(self, batch: StepBatch) -> SampleOutput:
            assert batch.logit_index.tolist() == [1, 5]
            return SampleOutput(
                torch.tensor([5]), torch.tensor([False]), unsampled_broken=torch.tensor([True])
            )

    world.add("x", "a", 2, 3)
    world.add("y", "a", 20, 3)
    queue = world.scheduler.queue("a")
    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    assert queue.cache is not None
    world.pipeline.launch(queue, Breaks(), queue.cache, planned[1])
    tokens = (SampledToken(5, False), SampledToken(0, True))
    assert world.pipeline.collect().tokens == tokens


def test_a_broken_invariant_is_nobodys_step_failure() -> None:
    world = World()

    class Wrong(TwoTokens):
        def execute(self, batch: StepBatch) -> SampleOutput:
            raise IntegrityError("a bug")

    world.add("x", "a", 2, 3)
    queue = world.scheduler.queue("a")
    planned = world.scheduler.schedule(0.0)
    assert planned is not None
    assert queue.cache is not None
    world.pipeline.launch(queue, Wrong(), queue.cache, planned[1])
    with pytest.raises(IntegrityError):
        world.pipeline.collect()
