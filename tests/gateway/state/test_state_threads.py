"""What waits for threads: callers in bounded numbers, ends of answers behind nobody."""

import asyncio
import threading

import pytest

from gateway.errors import QUEUE_FULL, ApiError
from gateway.state.state_threads import StateThreads


async def test_no_write_waits_behind_reads() -> None:
    threads, held = StateThreads(1, 8), threading.Event()
    try:
        reads = [asyncio.create_task(threads.read("ten_1", held.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert await threads.write(lambda: "stored") == "stored"
        assert not any(read.done() for read in reads)
        held.set()
        assert await asyncio.gather(*reads) == [True, True]
    finally:
        held.set()
        threads.close()


async def test_of_one_tenant_a_quarter_waits() -> None:
    threads, held = StateThreads(1, 8), threading.Event()
    try:
        reads = [asyncio.create_task(threads.read("ten_1", held.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await threads.read("ten_1", held.wait)
        assert (refused.value.kind, refused.value.retry_after_s) == (QUEUE_FULL, 1.0)
        reads.append(asyncio.create_task(threads.read("ten_2", held.wait)))
        held.set()
        assert await asyncio.gather(*reads) == [True] * 3
        assert await threads.read("ten_1", lambda: "again") == "again"
    finally:
        held.set()
        threads.close()
