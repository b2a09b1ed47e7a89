"""Why a request went to its worker: the figures of the choice, its bounds, and how it is told."""

import json
from typing import Any

import pytest

from gateway.dispatch.affinity import DELAY_SHARE
from gateway.dispatch.grant_choices import MAX_OTHERS, GrantChoice, GrantChoices
from tests.gateway.dispatch.test_affinity import LONG, ask, end, taught, two
from tests.gateway.dispatch.test_operator_handler import answer
from tests.gateway.scripted_worker import Rig


def choice_of(rig: Rig, request_id: str) -> GrantChoice:
    choice: GrantChoice
    (choice,) = rig.dispatcher.choices.find(request_id)
    return choice


async def test_the_cost_of_each_worker_is_what_the_choice_went_by() -> None:
    rig, one, other = two()
    taught(rig, one, other)
    ask(rig, "other", [5, *LONG])  # of two that rest the first
    ask(rig, "again", [*LONG, 7, 8])
    choice = choice_of(rig, "again")
    assert (choice.reason, choice.num_workers, choice.num_prompt_tokens) == ("lowest cost", 2, 402)
    chosen, loser = choice.workers
    assert (chosen.worker_id, chosen.outcome, chosen.num_running) == ("one", "chosen", 1)
    assert (loser.worker_id, loser.outcome, loser.num_running) == ("two", "higher cost", 0)
    assert chosen.cached_tokens == 384
    ahead_s = rig.local.dispatcher._running.live["other"].ahead_s
    assert chosen.delay_s == pytest.approx(DELAY_SHARE * ahead_s)
    unit_s = rig.local.dispatcher._estimators[0].unit_s("m")
    assert chosen.read_s == pytest.approx(18 * unit_s)
    assert (loser.delay_s, loser.cached_tokens) == (0.0, 0)
    assert loser.read_s == pytest.approx(402 * unit_s)


async def test_without_a_known_beginning_it_is_the_one_with_fewest_requests() -> None:
    rig, _, _ = two()
    for name in ("a", "b"):
        ask(rig, name, [1, 2, 3])
    assert [w.outcome for w in choice_of(rig, "a").workers] == ["chosen", "equal"]
    choice = choice_of(rig, "b")
    assert choice.reason == "fewest requests"
    assert [(w.worker_id, w.outcome) for w in choice.workers] == [
        ("two", "chosen"),
        ("one", "more requests"),
    ]


async def test_a_better_worker_that_could_not_take_it_says_why() -> None:
    rig, one, other = two(num_requests=1)
    taught(rig, one, other)
    one.num_requests = 0
    one.status()
    ask(rig, "again", [*LONG, 1])
    assert rig.dispatcher.choices.find("again") == [], "a full one does not come into question"
    one.num_requests = 1
    one.kv_tokens = 200  # too little for the prompt
    one.status()
    end(other, "again")
    ask(rig, "large", [*LONG, 2])
    choice = choice_of(rig, "large")
    assert choice.reason == "first with room"
    assert [(w.worker_id, w.outcome) for w in choice.workers] == [
        ("two", "chosen"),
        ("one", "not enough KV memory"),
    ]


async def test_one_worker_is_no_choice() -> None:
    rig = Rig()
    rig.worker()
    rig.ask("a")
    assert rig.dispatcher.choices.recent() == []
    (request,) = answer(rig, ask="why", what="a")["requests"]
    assert request["choice"] is None


async def test_few_workers_and_few_requests_are_kept() -> None:
    rig = Rig()
    for number in range(8):
        rig.worker(f"w{number}")
    rig.dispatcher.choices._most = 3
    for number in range(5):
        rig.ask(f"r{number}")
    kept = rig.dispatcher.choices.recent()
    assert [choice.request_id for choice in kept] == ["r4", "r3", "r2"]
    assert {len(choice.workers) for choice in kept} == {1 + MAX_OTHERS}
    assert {choice.num_workers for choice in kept} == {8}
    assert rig.dispatcher.choices.find("r0") == []


async def test_a_later_attempt_takes_the_place_of_the_first() -> None:
    rig, one, other = two()
    ask(rig, "a", [1, 2, 3])
    three = rig.worker("three", kv_tokens=10_000)
    one.die()
    assert three.submitted or other.submitted
    choice = choice_of(rig, "a")
    assert choice.attempt == 2
    assert {w.worker_id for w in choice.workers} == {"two", "three"}


def test_parts_of_a_request_are_found_in_their_order() -> None:
    choices = GrantChoices()
    for number in (0, 10, 2):
        name = f"r#{number}"
        choices._kept[name] = GrantChoice(name, 1, 0.0, "t", "m", "fewest requests", 1, 2, ())
    assert [one.request_id for one in choices.find("r")] == ["r#0", "r#2", "r#10"]
    assert choices.recent("n") == []


async def test_the_operator_is_told_of_live_and_of_ended_requests() -> None:
    rig, one, _ = two()
    rig.worker("cold", states={"n": "resident"})
    ask(rig, "a", [1, 2, 3])

    def told(**question: object) -> Any:
        return json.loads(json.dumps(answer(rig, **question)))

    (request,) = told(ask="why", what="a")["requests"]
    assert request["choice"]["workers"][0]["worker_id"] == "one"
    assert request["elsewhere"] == {"cold": 1.0}, "an unknown load counts a second"
    end(one, "a")
    (ended,) = told(ask="why", what="a")["ended"]
    assert (ended["request_id"], ended["reason"]) == ("a", "fewest requests")
    assert ended["at"] == pytest.approx(1_000_000.0 + rig.clock.now_s)
    assert [row["request_id"] for row in told(ask="grants", model="m")["grants"]] == ["a"]
    assert told(ask="grants", model="n")["grants"] == []
