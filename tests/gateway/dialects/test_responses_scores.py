"""Log-probabilities in Responses: those of the message's tokens and of no others."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.dialects.test_responses import TOOL, ask, check_told_to_the_end, stream_of
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, make_kit, score
from tests.gateway.state.test_event_streams import all_of
from tests.migrated import migrated

INCLUDED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
REASONED = "<think>\nhm So: The game\n</think>\n\nSo: The game 😀 is"


def tokens_of(entries: list[dict[str, Any]]) -> bytes:
    """The text that the entries say they are of."""
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def check_entries(kit: Kit, text: str, entries: list[dict[str, Any]]) -> None:
    """All tokens of the text are there, once, with what the worker said of them."""
    assert tokens_of(entries).decode().strip() == text.strip()
    by_piece = {bytes(kit_bytes): token_id for token_id, kit_bytes in pieces_of(kit).items()}
    for entry in entries:
        token_id = by_piece[bytes(entry["bytes"])]
        assert entry["logprob"] == score(token_id, 2).logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.25, -0.5]


def pieces_of(kit: Kit) -> dict[int, list[int]]:
    """Of the byte-level tokenizer, each token's bytes."""
    from_char = {char: byte for byte, char in byte_chars().items()}
    vocab = kit.tokenizer.get_vocab()
    return {
        token_id: [from_char[char] for char in token]
        for token, token_id in vocab.items()
        if all(char in from_char for char in token)
    }


def byte_chars() -> dict[int, str]:
    """GPT-2's: printable bytes are themselves, the others come behind U+0100 in their order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {
        **{byte: chr(byte) for byte in plain},
        **{byte: chr(256 + n) for n, byte in enumerate(others)},
    }


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "The game is afoot",
        REASONED,
        f"So: The game\n{CALL}",
        "a<<b",
        "<<x",
        "<think>\nhm\n</think>\n So a",
        "<<t << <tool",
        "a\n\na",
    ],
)
async def test_they_are_those_of_the_message(tmp_path: Path, text: str, one_by_one: bool) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    kit.dispatcher.script = kit.speak_slowly(text, 0.005) if one_by_one else kit.speak(text)
    async with client_of(kit) as client:
        fields = {**INCLUDED, "tools": [TOOL], "store": False}
        _, body = await ask(client, **fields)
        events = await stream_of(client, **fields)
    assert body["top_logprobs"] == 2
    told = []
    for items in (body["output"], check_told_to_the_end(events)):
        [message] = [item for item in items if item["type"] == "message"]
        [part] = message["content"]
        check_entries(kit, part["text"], part["logprobs"])
        told.append((part["text"], part["logprobs"]))
    assert told[0] == told[1]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [entry for e in deltas for entry in e["logprobs"]] == told[0][1]
    if one_by_one:
        assert sum(bool(e["logprobs"]) for e in deltas) > 1
    [done] = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == told[0][1]
    [added] = [e for e in events if e["type"] == "response.content_part.added"][-1:]
    assert added["part"]["logprobs"] == []


async def test_only_who_asks_gets_them(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    for fields, num_top in (
        ({"include": INCLUDED["include"]}, 0),
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 0}, None),
        ({}, None),
    ):
        _, body = await ask(client, store=False, **fields)
        found = {
            len(entry["top_logprobs"]) for entry in body["output"][0]["content"][0]["logprobs"]
        }
        assert found == (set() if num_top is None else {num_top})
    status, body = await ask(client, top_logprobs=21)
    assert (status, body["error"]["param"]) == (400, "top_logprobs")


async def test_a_background_stream_is_told_again_with_them(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024)
    migrated(kit.edge.services.settings.registry_url)
    kit.dispatcher.script = kit.speak(REASONED)
    async with client_of(kit) as client:
        live = await stream_of(client, **INCLUDED, background=True)
        assert any(event.get("logprobs") for event in live)
        assert await all_of(client, live[0]["response"]["id"]) == live


async def test_openais_own_client(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"{client.base}/v1", max_retries=0, _strict_response_validation=True
    ) as sdk:
        about: Any = {"model": "tiny", "input": "Hi", "store": False, **INCLUDED}
        told = await sdk.responses.create(**about)
        async with sdk.responses.stream(**about) as stream:
            final = await stream.get_final_response()
    parts: Any = [told.output[0], final.output[0]]
    entries = [[entry.token for entry in item.content[0].logprobs] for item in parts]
    assert entries[0] == entries[1]
    assert "".join(entries[0]) == "The game"
