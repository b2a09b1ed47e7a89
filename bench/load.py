"""Closed-loop and open-loop load over OpenAI chat completions.

Lives here: when each request goes out. Does not: one request's stream (`client.py`), arrival times
(`arrivals.py`), percentiles (`report.py`), servers.

    closed loop   `concurrency` callers, each sending its next request when the last one has ended:
                  what a machine can do
    open loop     requests go out at their arrival times whatever the server does, and latencies
                  count from the arrival: what callers would see
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench import client
from bench.arrivals import Arrival
from bench.client import ChatRequest, RequestResult, Target
from bench.prompts import PromptMaker


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All results of one round, in the order they ended, and the CPU seconds the client used."""

    results: list[RequestResult]
    wall_s: float
    client_cpu_s: float


def requests_for(arrivals: Sequence[Arrival], prompts: PromptMaker, seed: str) -> list[ChatRequest]:
    """Texts for the arrivals, made before the clock runs."""
    return [
        ChatRequest(index, prompts.prompt(item.prompt_tokens, seed, index), item.output_tokens)
        for index, item in enumerate(arrivals)
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


async def open_loop(
    target: Target, requests: Sequence[ChatRequest], arrivals: Sequence[Arrival]
) -> LoadRun:
    """Send request i at `arrivals[i].at_s` after the start, whatever is still running."""
    results: list[RequestResult] = []

    async def one(request: ChatRequest, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        results.append(await client.chat(session, target, request, due_s))

    async with client.new_session() as session:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(
                one(request, start_s + arrival.at_s)
                for request, arrival in zip(requests, arrivals, strict=True)
            )
        )
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
