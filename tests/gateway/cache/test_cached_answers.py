"""Cached answers over HTTP: by meaning, in their scope alone, and only whole ones are kept."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Submit
from gateway.cache.policy.cache_confidence import Calibration
from gateway.cache.types import Found, Scope, StoreUnavailable
from registry.accounts.key_terms import KeyCache
from tests.gateway.cache.embed_kit import ScriptedWorker, make_cached
from tests.gateway.edge_kit import KEY, Client, Kit, Running, client_of, key_record

URL = "/v1/chat/completions"
OTHER = "another-key-of-another-tenant"
SECOND = "second-key-of-the-first-tenant"
# The same words, whatever their case and signs: a hit without a comparison.
ASK, SAME, ELSE = "How do I reset my password?", "how do i reset my password", "When are you open?"
Setting = tuple[Kit, ScriptedWorker]


@pytest.fixture
async def setting(tmp_path: Path) -> Setting:
    kit, worker = make_cached(tmp_path)
    kit.edge.cache._draw = lambda: 0.99  # no audits
    kit.dispatcher.script = kit.speak("The game is afoot!")
    semantic = KeyCache("semantic")
    kit.use_keys(
        key_record(cache=semantic),
        key_record(SECOND, "key_2", cache=semantic),
        key_record(OTHER, "key_3", cache=semantic, tenant_id="ten_2"),
    )
    return kit, worker


@pytest.fixture
async def client(setting: Setting) -> AsyncIterator[Client]:
    async with client_of(setting[0]) as client:
        yield client


async def ask(
    client: Client, content: str = ASK, key: str = KEY, headers: Any = None, **body: Any
) -> tuple[str | None, str | None, Any]:
    messages = body.pop("messages", [{"role": "user", "content": content}])
    request = {"model": "tiny", "messages": messages, "temperature": 0, **body}
    async with client.post(URL, request, key, **(headers or {})) as answer:
        found = answer.headers.get("x-polyhost-cache"), answer.headers.get("x-polyhost-cache-entry")
        text = await answer.text()
        await asyncio.sleep(0.02)  # what landed is kept a moment later
        return *found, json.loads(text) if text.startswith("{") else text


def text_of(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


async def test_the_same_words_hit_and_say_where_they_are_from(
    setting: Setting, client: Client
) -> None:
    kit, _ = setting
    result, entry, first = await ask(client)
    assert (result, entry) == ("miss", None)
    result, entry, second = await ask(client, SAME, key=SECOND)
    assert (result, entry) == ("hit", first["id"])
    assert text_of(second) == text_of(first) == "The game is afoot!"
    assert second["id"] != first["id"]
    assert len(kit.dispatcher.requests) == 1
    assert [p.outcome for p in kit.ledger.posted] == ["finished", "cache_hit"]
    kit.check_closed()
    (kept,) = await kit.edge.cache.store.entries("ten_1", first["id"])
    assert (kept.question, kept.key_id) == (ASK, "key_1")


@pytest.mark.parametrize(
    "other",
    [
        {"key": OTHER},
        {"max_tokens": 9},
        {"messages": [{"role": "system", "content": "Lie."}, {"role": "user", "content": SAME}]},
        {"headers": {"x_polyhost_cache_mode": "exact"}},
        {"stop": ["x"]},
        {"content": ELSE},
        {"content": "How do I not reset my password?"},
        {"headers": {"cache_control": "no-cache"}},
        {"headers": {"cache_control": "max-age=0"}},
        {"headers": {"cache_control": "no-store"}},
    ],
    ids=str,
)
async def test_outside_its_scope_nothing_is_found(
    setting: Setting, client: Client, other: dict[str, Any]
) -> None:
    await ask(client)
    result, _, _ = await ask(client, **{"content": SAME, **other})
    assert result == "miss"
    assert len(setting[0].dispatcher.requests) == 2


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
@pytest.mark.parametrize("mode", ["exact", "semantic"])
async def test_another_users_answer_is_never_given(
    setting: Setting, client: Client, mode: str, field: str
) -> None:
    """ "What is my account balance?" has one answer a user, who is named beside the question."""
    headers = {"x_polyhost_cache_mode": mode}
    for name, result in (("alice", "miss"), ("bob", "miss"), (None, "miss"), ("alice", "hit")):
        given = {} if name is None else {field: name}
        found, _, _ = await ask(client, headers=headers, **given)
        assert (name, found) == (name, result)
    assert len(setting[0].dispatcher.requests) == 3


async def test_a_hit_is_replayed_as_a_stream(setting: Setting, client: Client) -> None:
    kit, _ = setting
    whole = "The game is afoot! Elementary, my dear Watson. The game is afoot! Elementary."
    kit.dispatcher.script = kit.speak(whole)
    await ask(client, max_tokens=200)
    options: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 200,
    }
    result, _, events = await ask(client, SAME, **options)
    assert result == "hit"
    lines = [line[6:] for line in events.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0]["role"] == "assistant"
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    assert len(texts) > 2
    assert "".join(texts) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == kit.ledger.posted[-1].completion_tokens


async def test_an_answer_that_our_bound_cut_is_not_kept(setting: Setting, client: Client) -> None:
    def cut(running: Running) -> None:
        running.say(setting[0].ids("The game"))
        running.end("length")

    setting[0].dispatcher.script = cut
    await ask(client)
    assert (await ask(client))[0] == "miss"
    await ask(client, max_tokens=2)
    assert (await ask(client, max_tokens=2))[0] == "hit"


async def test_an_aborted_or_empty_one_is_not_kept(setting: Setting, client: Client) -> None:
    setting[0].dispatcher.script = lambda running: running.end("stop")
    await ask(client)
    assert (await ask(client))[0] == "miss"
    setting[0].dispatcher.script = lambda running: running.end("error", error="broken")
    await ask(client)
    assert (await kit_size(setting)) == 0


async def kit_size(setting: Setting) -> int:
    return (await setting[0].edge.cache.store.size()).num_entries


async def test_no_store_keeps_nothing_and_no_cache_refreshes(
    setting: Setting, client: Client
) -> None:
    kit, _ = setting
    await ask(client, headers={"cache_control": "no-store"})
    assert await kit_size(setting) == 0
    await ask(client)
    kit.dispatcher.script = kit.speak("Elementary")
    assert text_of((await ask(client, headers={"cache_control": "no-cache"}))[2]) == "Elementary"
    assert text_of((await ask(client))[2]) == "Elementary"


async def test_shadow_serves_nothing_and_counts_what_it_would_have(
    setting: Setting, client: Client
) -> None:
    kit, _ = setting
    shadow = {"x_polyhost_cache_mode": "shadow"}
    for content in (ASK, SAME, ASK):
        assert (await ask(client, content, headers=shadow))[0] == "miss"
    kit.dispatcher.script = kit.speak("when are you open")
    assert (await ask(client, SAME + "!", headers=shadow))[0] == "miss"
    assert len(kit.dispatcher.requests) == 4
    checks = {
        outcome: kit.edge.services.metrics_registry.get_sample_value(
            "polyhost_semantic_cache_checks_total", {"outcome": outcome}
        )
        for outcome in ("agreed", "differed")
    }
    assert checks == {"agreed": 2, "differed": 1}


async def test_an_audit_withholds_a_hit_and_compares(setting: Setting, client: Client) -> None:
    kit, _ = setting
    await ask(client)
    kit.edge.cache._draw = lambda: 0.0
    assert (await ask(client, SAME))[0] == "miss"
    assert len(kit.dispatcher.requests) == 2
    value = kit.edge.services.metrics_registry.get_sample_value
    assert value("polyhost_semantic_cache_checks_total", {"outcome": "agreed"}) == 1


async def test_without_a_vector_in_time_it_is_a_miss_and_exact_still_hits(
    tmp_path: Path,
) -> None:
    kit, worker = make_cached(tmp_path, cache_embed_timeout_s=0.01)
    kit.dispatcher.script = kit.speak("x")
    kit.use_keys(key_record(cache=KeyCache("semantic")))
    worker.answers = False
    async with client_of(kit) as client:
        assert (await ask(client))[0] == "miss"
        assert (await ask(client, SAME))[0] == "miss"
        assert (await ask(client))[0] == "hit"


class Broken:
    """A store that is out of reach."""

    async def exact(self, scope: Scope, exact_key: bytes) -> Found:
        raise StoreUnavailable("out of reach")

    async def close(self) -> None:
        pass


async def test_a_store_out_of_reach_is_a_miss_and_keeps_nothing(
    setting: Setting, client: Client
) -> None:
    kit, worker = setting
    kit.edge.cache.store = Broken()  # type: ignore[assignment]
    for _ in range(2):
        result, _, body = await ask(client)
        assert result == "miss"
        assert text_of(body) == "The game is afoot!"
    assert worker.count(Submit) == 0
    assert kit.edge.cache.size.is_degraded
    kit.check_closed()


async def test_what_is_invalidated_while_it_is_made_is_not_kept(
    setting: Setting, client: Client
) -> None:
    kit, _ = setting
    kit.dispatcher.script = lambda running: None
    asking = asyncio.create_task(ask(client))
    await asyncio.wait_for(kit.dispatcher.came.wait(), 5)
    await kit.edge.cache.store.invalidate(tenant_id="ten_1")
    kit.speak("old")(kit.dispatcher.requests[0])
    await asking
    kit.dispatcher.script = kit.speak("new")
    result, _, body = await ask(client)
    assert (result, text_of(body)) == ("miss", "new")


async def test_nobody_follows_a_leader_from_before_an_invalidation(
    setting: Setting, client: Client
) -> None:
    kit, _ = setting
    kit.dispatcher.script = lambda running: None
    old = asyncio.create_task(ask(client))
    await asyncio.wait_for(kit.dispatcher.came.wait(), 5)
    await kit.edge.cache.store.invalidate(model_name="tiny")
    kit.dispatcher.script = kit.speak("new")
    assert text_of((await ask(client))[2]) == "new"
    kit.speak("old")(kit.dispatcher.requests[0])
    await old
    assert text_of((await ask(client))[2]) == "new"


async def test_an_answer_that_calls_a_tool_is_for_the_same_request_only(
    setting: Setting, client: Client
) -> None:
    """Not told by HTTP here: what is kept has no vector."""
    kit, _ = setting
    await ask(client, prompt_cache_key="x")
    [kept] = [n.entry for n in await near(kit)]
    assert kept.question == ASK
    made = replace(kept, vector=None, entry_id="e2", exact_key=b"e" * 32)
    await kit.edge.cache.store.keep(made)
    assert [n.entry.entry_id for n in await near(kit)] == [kept.entry_id]


async def near(kit: Kit) -> list[Any]:
    vectors = await kit.edge.cache.embedder.embed([ASK])
    assert vectors is not None
    first = next(e for e in [p.request_id for p in kit.ledger.posted])
    (entry,) = await kit.edge.cache.store.entries("ten_1", first)
    return await kit.edge.cache.store.nearest(entry.scope, vectors[0], 8)


async def test_above_temperature_0_only_who_asks_by_name(setting: Setting, client: Client) -> None:
    for _ in range(2):
        assert (await ask(client, temperature=1))[0] == "bypass"
    named = {"x_polyhost_cache_sampled": "true"}
    assert (await ask(client, temperature=1, headers=named))[0] == "miss"
    assert (await ask(client, SAME, temperature=1, headers=named))[0] == "hit"
    assert (await ask(client, SAME))[0] == "miss"


async def test_modes_that_need_an_embedder_are_refused_without(tmp_path: Path) -> None:
    from_kit = make_cached(tmp_path)[0]
    from_kit.edge.preparer._has_embedder = False
    async with client_of(from_kit) as client:
        _, _, body = await ask(client, headers={"x_polyhost_cache_mode": "semantic"})
    assert "polyhost models add" in body["error"]["message"]
    assert body["error"]["param"] == "x-polyhost-cache-mode"


async def test_what_was_learnt_outlives_the_server(setting: Setting, tmp_path: Path) -> None:
    kit, _ = setting
    async with client_of(kit) as client:
        for content in (ASK, "How do I change my password?", "How may I reset my old password?"):
            assert (await ask(client, content))[0] == "miss"
    learnt = await known(kit)
    assert sum(learnt.right) + sum(learnt.wrong) > 0
    await kit.edge.close(5.0)
    again, _ = make_cached(tmp_path)
    assert not (await known(again)).right  # it does not wait
    await again.edge.cache.calibrations.settle()
    assert await known(again) == learnt
    await again.edge.close(5.0)


async def known(kit: Kit) -> Calibration:
    """Of the first tenant's model, as its requests would use it now."""
    cache = kit.edge.cache
    scope = Scope("ten_1", kit.model.name, bytes(32))
    epoch = (await cache.store.exact(scope, bytes(32))).epoch
    return cache.calibrations.of(scope, epoch, cache.embedder.revision)
