"""What tests of batches share: lines, batches that are begun, and what came of them."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from gateway.batches.batch_output import line_id
from tests.gateway.edge_kit import KEY, Client, Kit
from tests.gateway.files.file_kit import (
    call,
    content,
    send,
)

ALL, CHATS = "/v1/batches", "/v1/chat/completions"


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 8}
    made = {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}
    return {**made, **changes}


def jsonl(lines: Iterable[Any]) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def begun(
    client: Client, lines: Iterable[Any], key: str = KEY, **fields: Any
) -> dict[str, Any]:
    file = await send(client, jsonl(lines), key)
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h", **fields}
    status, batch = await call(client, "POST", ALL, key, json=asked)
    assert (status, batch["status"]) == (200, "validating"), batch
    found: dict[str, Any] = batch
    return found


async def shown(client: Client, batch_id: str, key: str = KEY) -> dict[str, Any]:
    status, batch = await call(client, "GET", f"{ALL}/{batch_id}", key)
    assert status == 200, batch
    found: dict[str, Any] = batch
    return found


async def ended(client: Client, batch_id: str, key: str = KEY) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch = await shown(client, batch_id, key)
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def lines_of(client: Client, file_id: str | None) -> dict[str, Any]:
    """By custom id, each once."""
    if file_id is None:
        return {}
    status, data = await content(client, file_id)
    assert status == 200
    found = [json.loads(each) for each in data.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found)
    return by_id


def speak_back(kit: Kit) -> None:
    kit.dispatcher.script = kit.speak("The game", one_by_one=False)


def posted_once(kit: Kit, batch_id: str, num_lines: int) -> None:
    ids = Counter(posting.request_id for posting in kit.ledger.posted)
    assert ids == {f"chatcmpl-{line_id(batch_id, n)}": 1 for n in range(num_lines)}
