"""What runs beside the HTTP edge: tokenizers read before anybody asks, and what becomes of that."""

import asyncio
import os
from pathlib import Path

import pytest

from gateway.text.prepare_messages import LoadText, PrepareLimits
from gateway.text.prepare_pool import PreparePool
from tests.gateway.edge_kit import KEY, client_of, key_record, make_kit
from tests.gateway.prepare_kit import InlinePool


async def test_tokenizers_are_read_before_anybody_asks(tmp_path: Path) -> None:
    pool = InlinePool()
    kit = make_kit(tmp_path / "tiny", pool=pool)
    async with kit.edge.running():
        while not pool.jobs:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await kit.edge.codecs.text(kit.model)
    assert pool.count(LoadText) == 1
    await kit.edge.close(1.0)


async def test_a_server_that_stops_ends_its_processes(tmp_path: Path) -> None:
    pool = PreparePool(2, 8)
    kit = make_kit(tmp_path / "tiny", pool=pool)
    async with kit.edge.running():
        await kit.edge.codecs.text(kit.model)
        [pid] = pool.pids
    await kit.edge.close(1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_template_without_end_is_one_tenants_error(tmp_path: Path) -> None:
    """On the event loop it stopped every tenant's requests for good."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    word = "{% if 'zz' in messages[0].content %}" + loop + "{% endif %}hi"
    pool = PreparePool(2, 16, PrepareLimits(cpu_s=0.1))
    kit = make_kit(tmp_path / "tiny", word, pool=pool)
    other = "test-key-of-another"
    kit.use_keys(key_record(), key_record(other, key_id="key_2", tenant_id="ten_2"))
    kit.dispatcher.script = kit.speak("The game is afoot!")
    async with client_of(kit) as client:

        async def ask(text: str, key: str = KEY) -> tuple[int, str]:
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
            async with client.post("/v1/chat/completions", body, key) as response:
                answer = await response.json()
            return response.status, answer.get("error", {}).get("code", "")

        attack = asyncio.create_task(ask("zz"))
        assert await ask("a", other) == (200, "")
        assert await attack == (503, "model_failed")
        assert await ask("a") == (503, "model_failed")
        assert await ask("a", other) == (200, "")
    assert kit.edge.metrics.prepare_offences.labels("tiny")._value.get() == 1
    assert kit.edge.store.num_open == 0
    assert os.getpid() not in pool.pids
