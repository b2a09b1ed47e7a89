"""Hostile small files of models against the limits of the processes that read them.

Every attack is one that stopped or ended a gateway when its files were read there. What is asserted
is where the work was done and how it ended, never how long it took.
"""

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from gateway.errors import ApiError
from gateway.text import prepare_pool, prepare_process
from gateway.text.prepare_messages import (
    EncodeChat,
    EncodePrompt,
    EncodeTexts,
    Failed,
    Ids,
    LoadText,
    Longer,
    Measure,
    PrepareLimits,
    Reply,
    TextFacts,
    encode_reply,
)
from gateway.text.prepare_pool import PreparePool, PrepareSpent
from tests.gateway.edge_kit import CHAT_TEMPLATE, write_model

LIMITS = PrepareLimits(cpu_s=0.15, load_s=5.0, memory_bytes=192 << 20)
MOST = 4096
ENDED = r"more (CPU time|memory) than a request may take"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(s=messages[0].content) %}"
    "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
SPENT = {
    "a loop behind a word": "{% if 'zz' in messages[0].content %}" + LOOP + "{% endif %}",
    "a loop": LOOP,
    "a width": "{{ '%1000000000d' % 1 }}",
    "a text doubled": DOUBLING,
}


@pytest.fixture
def pool() -> Iterator[PreparePool]:
    pool = PreparePool(2, 16, LIMITS)
    yield pool
    pool.close()


@pytest.fixture
def honest(tmp_path: Path) -> str:
    write_model(tmp_path / "honest")
    return str(tmp_path / "honest")


def chat(folder: str, text: str = "zz") -> EncodeChat:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    return EncodeChat(folder, messages, (), True, False, MOST)


def changed(folder: Path, change: dict[str, Any] | None = None, **parts: Any) -> str:
    """A model with another tokenizer."""
    tokenizer: Tokenizer = write_model(folder)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    document = {**json.loads(tokenizer.to_str()), **(change or {})}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return str(folder)


async def served(pool: PreparePool, folder: str) -> bool:
    """Another model's request."""
    return isinstance(await pool.ask(chat(folder)), Ids)


@pytest.mark.parametrize("template", SPENT.values(), ids=SPENT)
async def test_a_template_without_end_is_ended_and_others_are_served(
    template: str, tmp_path: Path, pool: PreparePool, honest: str
) -> None:
    write_model(tmp_path / "hostile", template)
    assert await served(pool, honest)
    with pytest.raises(PrepareSpent, match=ENDED):
        await pool.ask(chat(str(tmp_path / "hostile")))
    assert await served(pool, honest)
    assert os.getpid() not in pool.pids


async def test_others_are_served_while_it_loops(
    tmp_path: Path, pool: PreparePool, honest: str
) -> None:
    """The event loop stands for nothing, and one process is kept from long jobs."""
    write_model(tmp_path / "hostile", LOOP)
    attack = asyncio.create_task(pool.ask(chat(str(tmp_path / "hostile")), is_long=True))
    num_served = 0
    while not attack.done():
        num_served += await served(pool, honest)
    assert num_served > 1
    with pytest.raises(PrepareSpent):
        await attack


async def test_normalizers_that_explode_end_no_gateway(
    tmp_path: Path, pool: PreparePool, honest: str
) -> None:
    steps = [normalizers.Replace("a", "a" * 10)] * 9
    folder = changed(tmp_path / "hostile", normalizer=normalizers.Sequence(steps))
    with pytest.raises(PrepareSpent, match=ENDED):
        await pool.ask(EncodePrompt(folder, "aaaa", MOST))
    assert await served(pool, honest)


async def test_a_regular_expression_that_panics_is_the_requests_error(
    tmp_path: Path, honest: str
) -> None:
    """It gives up after some 0.1 s of CPU time, as the processor is: it must have that."""
    pool = PreparePool(2, 16, PrepareLimits(cpu_s=30.0))
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    folder = changed(tmp_path / "hostile", pre_tokenizer=split)
    reply = await pool.ask(EncodePrompt(folder, "a" * 400 + "b", MOST))
    assert isinstance(reply, Failed)
    assert (reply.kind, "cannot encode this text" in reply.message) == ("text", True)
    assert await served(pool, honest)
    pool.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": 5}}, "unusable tokenizer"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 1 << 22}, "unk_token": "a"}}, "token id"),
        ({"model": {"type": "WordLevel", "vocab": {"a" * 70_000: 0}, "unk_token": "a"}}, "token"),
    ],
)
async def test_files_that_are_no_tokenizer(
    change: dict[str, Any], said: str, tmp_path: Path, pool: PreparePool
) -> None:
    folder = changed(tmp_path, {"added_tokens": [], **change})
    reply = await pool.ask(LoadText(folder))
    assert isinstance(reply, Failed)
    assert reply.kind == "files"
    assert said in reply.message


async def test_a_template_that_loops_when_the_model_is_read(tmp_path: Path) -> None:
    pool = PreparePool(1, 4, PrepareLimits(cpu_s=0.1, load_s=0.3))
    write_model(tmp_path, LOOP)  # a sample is rendered, to know how it takes calls
    with pytest.raises(PrepareSpent, match="CPU time"):
        await pool.ask(LoadText(str(tmp_path)))
    pool.close()


async def test_prompts_and_facts(tmp_path: Path, pool: PreparePool, honest: str) -> None:
    facts = await pool.ask(LoadText(honest))
    assert isinstance(facts, TextFacts)
    assert facts.template == CHAT_TEMPLATE
    assert await pool.ask(Measure(honest, ["x " * 9000], 4)) == Longer(5, is_exact=False)
    reply = await pool.ask(EncodePrompt(honest, "the game is", 2))
    assert isinstance(reply, Longer)
    assert reply.is_exact
    text = await pool.ask(chat(honest, "10" * 400_000))  # more than one read of the socket
    assert isinstance(text, Longer)
    texts = await pool.ask(EncodeTexts(honest, ["a"] * 20_000, 8, cut=False))
    assert len(texts.inputs) == 20_000  # type: ignore[union-attr]
    numbers = chat(honest)
    numbers.messages[0]["n"] = 10**40
    assert isinstance(await pool.ask(numbers), Ids)


async def test_a_job_whose_caller_left_is_done_and_its_process_used_again(honest: str) -> None:
    pool = PreparePool(1, 4)
    assert await served(pool, honest)
    [pid] = pool.pids
    left = asyncio.create_task(pool.ask(chat(honest, "x" * 5000)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    left.cancel()
    assert await served(pool, honest)
    assert pool.pids == [pid]
    pool.close()


def test_a_job_that_is_cancelled_leaves_its_reply_to_nobody(honest: str) -> None:
    """An event loop that ends cancels what runs on it; the pool may have another one after."""
    pool = PreparePool(1, 16, LIMITS)

    async def begin() -> None:
        await pool.ask(LoadText(honest))
        task = asyncio.create_task(pool.ask(EncodePrompt(honest, "the other's", MOST)))
        while not pool._processes[0].is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()

    async def ask() -> Reply:
        return await pool.ask(LoadText(honest))

    for _ in range(5):
        asyncio.run(begin())
        assert isinstance(asyncio.run(ask()), TextFacts)
    pool.close()


async def test_nobody_waits_for_a_pool_that_is_closed(honest: str) -> None:
    pool = PreparePool(1, 4)
    assert await served(pool, honest)
    [pid] = pool.pids
    os.kill(pid, signal.SIGSTOP)  # neither job can end before the pool is closed
    jobs = [asyncio.create_task(pool.ask(chat(honest))) for _ in range(2)]
    await asyncio.sleep(0.01)
    pool.close()
    done, _ = await asyncio.wait(jobs, timeout=5.0)
    assert len(done) == 2
    assert all(job.cancelled() for job in jobs)
    assert pool.is_idle
    assert not pool.pids


async def test_a_process_that_ends_between_jobs_costs_nobody_his_request(honest: str) -> None:
    pool = PreparePool(1, 4)
    assert await served(pool, honest)
    [child] = [process._child for process in pool._processes]
    assert child is not None
    child.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert await served(pool, honest)
    assert pool.pids != [child.pid]
    pool.close()


async def test_a_request_nested_too_deeply_is_its_own_error(pool: PreparePool) -> None:
    """The arguments of a call may be as deep as they were just read."""
    arguments: dict[str, Any] = {}
    for _ in range(2000):
        arguments = {"a": arguments}
    job = chat("m")
    job.messages[0]["tool_calls"] = [arguments]
    with pytest.raises(ValueError, match="nested too deeply"):
        await pool.ask(job)
    assert pool.is_idle


async def test_jobs_beyond_the_bound_are_refused(honest: str) -> None:
    pool = PreparePool(1, 2)
    jobs = [asyncio.create_task(pool.ask(chat(honest))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="overloaded"):
        await pool.ask(chat(honest))
    await asyncio.gather(*jobs)
    pool.close()


async def test_long_jobs_leave_one_process_to_short_ones(
    honest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PreparePool(2, 16)
    taken: list[tuple[int, bool]] = []
    gate = asyncio.Event()

    async def held(process: Any, folder: str, body: bytes) -> bytes:
        is_long = len(body) > prepare_pool.LONG_BYTES
        taken.append((pool._processes.index(process), is_long))
        process.folders.add(folder)
        if is_long:
            await gate.wait()
        return encode_reply(Ids())

    monkeypatch.setattr(prepare_pool._Process, "ask", held)
    long = [asyncio.create_task(pool.ask(chat("m", "x" * 40_000))) for _ in range(3)]
    await asyncio.sleep(0)
    assert isinstance(await pool.ask(chat("m")), Ids)
    assert isinstance(await pool.ask(chat("m")), Ids)
    assert taken == [(1, True), (0, False), (0, False)]
    gate.set()
    replies: list[Reply] = await asyncio.gather(*long)
    assert len(replies) == 3
    assert [process for process, is_long in taken if is_long] == [1, 1, 1]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, list[str]]:
    """Processes that wait for it, and the models that they were asked about."""
    gate = asyncio.Event()
    taken: list[str] = []

    async def held(process: Any, folder: str, body: bytes) -> bytes:
        taken.append(folder)
        await gate.wait()
        return encode_reply(Ids())

    monkeypatch.setattr(prepare_pool._Process, "ask", held)
    return gate, taken


async def test_a_tenant_with_many_jobs_delays_anothers_by_one(
    gate: tuple[asyncio.Event, list[str]],
) -> None:
    opened, taken = gate
    pool = PreparePool(1, 64)
    many = [asyncio.create_task(pool.ask(chat("many"), False, "many")) for _ in range(20)]
    await asyncio.sleep(0.01)
    few = asyncio.create_task(pool.ask(chat("few"), False, "few"))
    await asyncio.sleep(0)
    opened.set()
    await asyncio.gather(few, *many)
    assert taken[:3] == ["many", "few", "many"]


async def test_where_all_places_are_taken_who_has_most_gives_way(
    gate: tuple[asyncio.Event, list[str]],
) -> None:
    opened, _ = gate
    pool = PreparePool(1, 6)
    many = [asyncio.create_task(pool.ask(chat("m"), False, "many")) for _ in range(6)]
    await asyncio.sleep(0)
    few = [asyncio.create_task(pool.ask(chat("m"), False, f"few{n % 2}")) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="overloaded"):
        await pool.ask(chat("m"), False, "many")
    opened.set()
    ends = await asyncio.gather(*many, *few, return_exceptions=True)
    assert [isinstance(end, Ids) for end in ends] == [True] * 3 + [False] * 3 + [True] * 3
    assert all(isinstance(end, ApiError) for end in ends[3:6])
    assert pool.is_idle


def test_a_refusal_leaves_no_timer_to_the_next_job() -> None:
    """It would count while that comes in, and end it."""
    budget = prepare_process.Budget(LIMITS)
    memory = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with pytest.raises(ValueError, match="refused"), budget.job(10):
            raise ValueError("refused")
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, memory)


async def test_a_process_ends_with_its_gateway_and_not_by_the_service_managers_signal(
    honest: str,
) -> None:
    pool = PreparePool(1, 4)
    assert await served(pool, honest)
    [pid] = pool.pids
    os.kill(pid, signal.SIGTERM)
    assert await served(pool, honest)
    assert pool.pids == [pid]
    pool.close()
