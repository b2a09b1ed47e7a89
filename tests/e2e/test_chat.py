"""Three models, room for two: what a tenant's OpenAI client gets is what transformers says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import Prepared
from tests.e2e.server import DEMO_MODELS, NAMES, Server, polyhost, serving

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 300
CONCURRENCY = 16
# Two of the three models' weights and KV for all requests; never all three.
DEVICE_BUDGET = "18MiB"
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
    return 8 + 7 * prompt_number


async def ask_all(server: Server, key: str) -> list[tuple[str, str, Any]]:
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
        return await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))


def exported_rows(data_dir: Path) -> list[dict[str, Any]]:
    done = polyhost(data_dir, "usage", "export", "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def test_300_requests_over_three_models_in_room_for_two(
    prepared: Prepared, tmp_path: Path
) -> None:
    expected = {name: reference_answers(name) for name in NAMES}
    data_dir = prepared.copy_to(tmp_path)
    with serving(data_dir, "--device-budget", DEVICE_BUDGET) as server:
        answers = await ask_all(server, prepared.key)
        metrics = server.metrics()
        for model, prompt, answer in answers:
            text, completion_tokens, prompt_tokens = expected[model][prompt]
            choice = answer.choices[0]
            # A text that was cut in the middle of a character ends before it.
            assert choice.message.content == text.rstrip("�"), (model, prompt)
            assert answer.usage.completion_tokens == completion_tokens
            assert answer.usage.prompt_tokens == prompt_tokens
        swaps = {key: value for key, value in metrics.items() if "polyhost_swaps_total" in key}
        evictions = sum(value for key, value in swaps.items() if 'kind="evict"' in key)
        assert evictions >= 3, swaps
        for name in NAMES:
            done = polyhost(data_dir, "models", "unload", name)
            assert done.returncode == 0, done.stderr
        server.wait_until(lambda: _all_pages_free(server))
    rows = exported_rows(data_dir)
    by_id = {row["request_id"]: row for row in rows}
    assert len(rows) == len(by_id) == NUM_REQUESTS
    for _, _, answer in answers:
        row = by_id[answer.id]
        assert row["outcome"] == "finished"
        assert row["prompt_tokens"] == answer.usage.prompt_tokens
        assert row["completion_tokens"] == answer.usage.completion_tokens


def _all_pages_free(server: Server) -> bool:
    pages = {k: v for k, v in server.metrics().items() if k.startswith("polyhost_arena_pages")}
    owned = sum(value for key, value in pages.items() if "free" not in key)
    return owned == 0 and sum(pages.values()) > 0


async def test_streams_and_completions_through_the_sdk(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    with serving(data_dir) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=prepared.key, max_retries=0
        ) as client:
            listed = [model.id async for model in client.models.list()]
            assert sorted(listed) == sorted(NAMES)
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
