"""Which worker a head goes to: where its prompt's beginning is, unless that is later."""

import msgspec

from engine.protocol import SwapRecord
from gateway.dispatch.tickets import RequestStream
from tests.gateway.scripted_worker import Rig, ScriptedWorker, prepared, principal

LONG = list(range(10, 410))


def two(**options: object) -> tuple[Rig, ScriptedWorker, ScriptedWorker]:
    rig = Rig()
    options = {"kv_tokens": 10_000, **options}
    one, other = rig.worker("one", **options), rig.worker("two", **options)
    rig.clock.now_s += 0.5
    return rig, one, other


def ask(
    rig: Rig, name: str, prompt: list[int], tenant: str = "t", max_tokens: int = 20
) -> RequestStream:
    request = msgspec.structs.replace(
        prepared(name, max_tokens=max_tokens), prompt_token_ids=prompt
    )
    return rig.dispatcher.run(request, principal(tenant))


def end(worker: ScriptedWorker, name: str, service_s: float = 0.1) -> None:
    worker.finish(name, token_ids=(1,), generated=1, service_s=service_s)
    worker.status()


def taught(rig: Rig, one: ScriptedWorker, two: ScriptedWorker) -> None:
    """A prompt has run on `one`, and what tokens cost is known: a millisecond each."""
    ask(rig, "first", LONG)
    assert one.submitted[-1] == "first"
    end(one, "first", service_s=0.4)
    two.status()


async def test_a_prompt_goes_where_its_beginning_is_though_others_are_less_busy() -> None:
    rig, one, other = two()
    taught(rig, one, other)
    ask(rig, "short", [1, 2, 3])
    assert one.submitted[1:] == ["short"], "of two that rest the first"
    ask(rig, "again", [*LONG, 7, 8])
    assert one.submitted[2:] == ["again"]
    ask(rig, "new", [5, *LONG])
    assert other.submitted == ["new"], "a prompt that begins otherwise goes to the less busy one"


async def test_another_tenants_prompt_is_another_prompt() -> None:
    rig, one, other = two()
    taught(rig, one, other)
    ask(rig, "busy", [1, 2, 3])
    ask(rig, "others", LONG, tenant="u")
    assert other.submitted == ["others"]


async def test_a_crowd_with_one_beginning_spreads() -> None:
    rig, one, other = two(num_requests=100, kv_tokens=100_000)
    ask(rig, "first", LONG, max_tokens=200)
    one.finish("first", token_ids=(1,), generated=100, service_s=0.6)
    for worker in (one, other):
        worker.status()
    for number in range(60):
        ask(rig, f"r{number}", [*LONG, number], max_tokens=200)
        assert number > 5 or not other.running
    assert len(one.running) > 20
    assert len(other.running) > 20, "once it has been read there, it is there, too"


async def test_nobody_waits_for_a_full_one() -> None:
    rig, one, other = two(num_requests=1)
    taught(rig, one, other)
    ask(rig, "a", [*LONG, 1])
    assert one.submitted[1:] == ["a"]
    ask(rig, "b", [*LONG, 2])
    assert other.submitted == ["b"]


async def test_what_has_no_kv_has_no_beginning() -> None:
    rig, one, other = two(num_requests=1)
    taught(rig, one, other)
    request = msgspec.structs.replace(
        prepared("scored", max_tokens=20), prompt_token_ids=LONG, prompt_logprobs=0
    )
    rig.dispatcher.run(request, principal("t"))
    assert rig.local.live["scored"].marks == ()


async def test_who_has_died_or_unloaded_the_model_has_no_beginning() -> None:
    for loses in (True, False):
        rig, one, other = two()
        taught(rig, one, other)
        if loses:
            one.die()
            one.connect()
        else:
            one.status(swaps=[SwapRecord("m", "evict", "none", 1000, 0.0)])
        ask(rig, "busy", [1, 2, 3])
        ask(rig, "again", LONG)
        assert other.submitted == ["again"]
