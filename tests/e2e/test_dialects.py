"""One model through every API on a real server: the same text, the same tokens, one bill each."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import aiohttp
import pytest

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.server import polyhost_process, usage_rows

pytestmark = pytest.mark.e2e

MODEL, LENGTH, PROMPT = "sherlock", 12, "The game is afoot, Watson."
USER = {"role": "user", "content": PROMPT}
Ask: TypeAlias = Callable[..., Awaitable[dict[str, Any]]]


async def test_every_dialect_has_the_same_answer(prepared: Prepared, server: Server) -> None:
    headers = {"authorization": f"Bearer {prepared.key}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as session:

        async def ask(path: str, **fields: Any) -> dict[str, Any]:
            async with session.post(path, json={"model": MODEL, **fields}) as answer:
                assert answer.status == 200, await answer.text()
                body: dict[str, Any] = await answer.json()
                return body

        greedy = {"temperature": 0}
        chat = await ask("/v1/chat/completions", messages=[USER], max_tokens=LENGTH, **greedy)
        message = await ask("/v1/messages", messages=[USER], max_tokens=LENGTH, **greedy)
        response = await ask("/v1/responses", input=PROMPT, max_output_tokens=LENGTH, **greedy)
        text = chat["choices"][0]["message"]["content"]
        assert message["content"] == [{"type": "text", "text": text}]
        assert response["output"][0]["content"][0]["text"] == text
        num_prompt = chat["usage"]["prompt_tokens"]
        assert (await ask("/tokenize", messages=[USER]))["count"] == num_prompt
        counted = await ask("/v1/messages/count_tokens", messages=[USER])
        assert counted == {"input_tokens": num_prompt}
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_prompt
        assert response["usage"]["input_tokens"] == num_prompt
        await _check_several_prompts(ask)
    server.wait_until(server.has_posted)
    rows = {row["request_id"]: row for row in usage_rows(server.data_dir, polyhost_process)}
    for body in (chat, message, response):
        row = rows[body["id"]]
        assert (row["prompt_tokens"], row["completion_tokens"]) == (num_prompt, LENGTH)
        assert row["outcome"] == "finished"


async def _check_several_prompts(ask: Ask) -> None:
    """Each prompt of several has the answer that it has alone, and its own scores."""
    prompts = ["The game is", "It was a dark night; the rain"]
    fields = {"max_tokens": LENGTH, "temperature": 0, "logprobs": 0, "echo": True}
    together = await ask("/v1/completions", prompt=prompts, **fields)
    for choice, prompt in zip(together["choices"], prompts, strict=True):
        alone = (await ask("/v1/completions", prompt=prompt, **fields))["choices"][0]
        assert choice["text"] == alone["text"]
        assert choice["text"].startswith(prompt)
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[1:] == pytest.approx(alone["logprobs"]["token_logprobs"][1:], abs=1e-3)
