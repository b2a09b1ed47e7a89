"""What is noted of a stream while it runs: enough for a bill where nobody is left to tell."""

from pathlib import Path

import pytest

from tests.gateway.edge_kit import Client, Kit, make_kit

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = "The game is afoot! " * 6


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path, ledger_checkpoint_tokens=4)


async def test_a_stream_is_noted_every_so_many_tokens(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak_slowly(TEXT, 0.005)
    await client.events("/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 120})
    noted = [tokens for _, tokens in kit.ledger.checkpoints]
    assert noted == sorted(noted)
    assert len(noted) >= 3
    assert all(later - earlier >= 4 for earlier, later in zip([0, *noted], noted, strict=False))
    assert noted[-1] <= kit.ledger.only.completion_tokens
    assert {name for name, _ in kit.ledger.checkpoints} == {kit.ledger.only.request_id}


async def test_a_whole_answer_is_not(kit: Kit, client: Client) -> None:
    """Nothing of it is sent before its end: a client that got nothing owes nothing."""
    kit.dispatcher.script = kit.speak(TEXT)
    async with client.post("/v1/chat/completions", {**CHAT, "max_tokens": 120}) as answer:
        assert answer.status == 200
    assert kit.ledger.checkpoints == []
    assert kit.ledger.opened[0].reserved_nanos >= kit.ledger.only.cost_nanos
