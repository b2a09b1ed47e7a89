"""Closed-loop load over OpenAI chat completions.

Lives here: when each request goes out: callers that each send their next request when the last one
has ended. Does not: one request's stream (`client.py`), percentiles (`report.py`), servers.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench import client
from bench.client import ChatRequest, RequestResult, Target
from bench.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All results of one round, in the order they ended, and the CPU seconds the client used."""

    results: list[RequestResult]
    wall_s: float
    client_cpu_s: float


def requests_for(
    prompts: PromptMaker, seed: str, count: int, prompt_tokens: int, output_tokens: int
) -> list[ChatRequest]:
    """Requests of these lengths, made before the clock runs."""
    return [
        ChatRequest(index, prompts.prompt(prompt_tokens, seed, index), output_tokens)
        for index in range(count)
    ]


async def closed_loop(target: Target, requests: Sequence[ChatRequest], concurrency: int) -> LoadRun:
    """Send all requests, never more than `concurrency` at a time."""
    if concurrency < 1:
        raise ValueError("a closed loop needs at least one caller")
    waiting = iter(requests)
    results: list[RequestResult] = []

    async def caller() -> None:
        for request in waiting:
            results.append(await client.chat(session, target, request, time.perf_counter()))

    async with client.new_session() as session:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return _run(results, start_s, start_cpu_s)


async def until(target: Target, requests: Sequence[ChatRequest], stop: asyncio.Event) -> LoadRun:
    """One caller going round the requests until `stop` is set; the last one is let finish."""
    results: list[RequestResult] = []
    async with client.new_session() as session:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while not stop.is_set():
            request = requests[len(results) % len(requests)]
            results.append(await client.chat(session, target, request, time.perf_counter()))
            if results[-1].error:
                await asyncio.sleep(0.1)  # a refusing server is not hammered
        return _run(results, start_s, start_cpu_s)


def _run(results: list[RequestResult], start_s: float, start_cpu_s: float) -> LoadRun:
    wall_s = time.perf_counter() - start_s
    return LoadRun(results, wall_s, time.process_time() - start_cpu_s)
