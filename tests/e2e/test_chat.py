"""Three models, room for two: what a tenant's OpenAI client gets is what transformers says."""

import asyncio
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import DEMO_MODELS, HOSTED, NAMES
from tests.e2e.server import owned_pages, polyhost, polyhost_process, usage_rows

pytestmark = pytest.mark.e2e

CONCURRENCY = 16
PROMPTS = (
    "Tell me about love.",
    "What light through yonder window breaks?",
    "The game is afoot, Watson.",
    "def quicksort(items):",
    "Who goes there?",
    "import math",
    "It was a dark night; the rain fell in Baker Street.",
    "Ünïcödé — 你好, שלום 🎭",
    "class Matrix:",
    "a",
)


def reference_answers(name: str) -> dict[str, tuple[str, int, int]]:
    """Text, completion tokens and prompt tokens of each prompt by transformers alone, in fp32."""
    folder = DEMO_MODELS / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = {}
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens(i),
            do_sample=False,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answers[prompt] = (text, len(out), ids.shape[1])
    return answers


def max_tokens(prompt_number: int) -> int:
    """Unlike lengths, so that requests join and leave a batch at all times."""
    return 6 + 4 * prompt_number


async def ask_all(server: Server, key: str, num_requests: int) -> list[tuple[str, str, Any]]:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    gate = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> tuple[str, str, Any]:
        # Neighbours ask for different models, so that the two resident ones never suffice.
        model, which = NAMES[number % 3], (number // 3) % len(PROMPTS)
        async with gate:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": PROMPTS[which]}],
                max_tokens=max_tokens(which),
                temperature=0,
                timeout=120,
            )
        return model, PROMPTS[which], answer

    async with client:
        return await asyncio.gather(*(ask(number) for number in range(num_requests)))


def evictions(server: Server) -> float:
    swaps = {k: v for k, v in server.metrics().items() if k.startswith("swaps_total")}
    return sum(value for key, value in swaps.items() if 'kind="evict"' in key)


@pytest.mark.parametrize("num_requests", [45, pytest.param(300, marks=pytest.mark.soak)])
async def test_requests_over_three_models_in_room_for_two(
    prepared: Prepared, server: Server, num_requests: int
) -> None:
    expected = {name: reference_answers(name) for name in NAMES}
    evicted_before = evictions(server)
    answers = await ask_all(server, prepared.key, num_requests)
    for model, prompt, answer in answers:
        text, completion_tokens, prompt_tokens = expected[model][prompt]
        choice = answer.choices[0]
        # A text that was cut in the middle of a character ends before it.
        assert choice.message.content == text.rstrip("\ufffd"), (model, prompt)
        assert answer.usage.completion_tokens == completion_tokens
        assert answer.usage.prompt_tokens == prompt_tokens
    assert evictions(server) - evicted_before >= 3
    for name in (*NAMES, *HOSTED):
        done = polyhost(server.data_dir, "models", "unload", name)
        assert done.returncode == 0, done.stderr
    server.wait_until(lambda: owned_pages(server) == 0)
    server.wait_until(server.has_posted)
    asked = {answer.id for _, _, answer in answers}
    posted = usage_rows(server.data_dir, polyhost_process)
    rows = [row for row in posted if row["request_id"] in asked]
    by_id = {row["request_id"]: row for row in rows}
    assert len(rows) == len(by_id) == num_requests
    for _, _, answer in answers:
        row = by_id[answer.id]
        assert row["outcome"] == "finished"
        assert row["prompt_tokens"] == answer.usage.prompt_tokens
        assert row["completion_tokens"] == answer.usage.completion_tokens


async def test_streams_and_completions_through_the_sdk(prepared: Prepared, server: Server) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=prepared.key, max_retries=0
    ) as client:
        listed = [model.id async for model in client.models.list()]
        assert sorted(listed) == sorted([*NAMES, *HOSTED])
        messages: Any = [{"role": "user", "content": "Tell me about love."}]
        whole = await client.chat.completions.create(
            model="shakespeare", messages=messages, max_tokens=40, temperature=0
        )
        pieces: list[str] = []
        usage = None
        stream = await client.chat.completions.create(
            model="shakespeare",
            messages=messages,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            pieces.extend(choice.delta.content or "" for choice in chunk.choices)
        assert "".join(pieces) == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens
        seeded = [
            await client.completions.create(
                model="sherlock",
                prompt="Holmes looked at",
                max_tokens=20,
                temperature=1.0,
                top_p=0.9,
                seed=7,
            )
            for _ in range(2)
        ]
        assert seeded[0].choices[0].text == seeded[1].choices[0].text
        full = seeded[0].choices[0].text
        stop = full[6:9]
        stopped = await client.completions.create(
            model="sherlock",
            prompt="Holmes looked at",
            max_tokens=20,
            temperature=1.0,
            top_p=0.9,
            seed=7,
            stop=[stop],
        )
        assert stopped.choices[0].text == full[: full.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
