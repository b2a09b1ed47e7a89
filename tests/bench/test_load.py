"""The load generator against a scripted server: scheduling, timing, token counts, errors."""

import pytest

from bench import load
from bench.client import ChatRequest, RequestResult, Target
from bench.report import summarise
from tests.bench.scripted_server import Script, ScriptedServer, scripted_server


def make_requests(count: int, max_tokens: int = 3) -> list[ChatRequest]:
    return [ChatRequest(index, f"prompt {index}", max_tokens) for index in range(count)]


def target(server: ScriptedServer, **changes: object) -> Target:
    return Target("t", server.base_url, "m", **changes)  # type: ignore[arg-type]


async def one(script: Script, **changes: object) -> RequestResult:
    async with scripted_server(script) as server:
        run = await load.closed_loop(target(server, **changes), make_requests(1), 1)
    assert len(run.results) == 1
    return run.results[0]


async def test_closed_loop_keeps_exactly_the_concurrency_in_flight() -> None:
    async with scripted_server(Script(first_delay_s=0.02)) as server:
        run = await load.closed_loop(target(server), make_requests(12), 4)
    assert server.most_in_flight == 4
    assert sorted(r.index for r in run.results) == list(range(12))
    assert not any(r.error for r in run.results)
    assert run.wall_s >= 3 * 0.02


async def test_request_carries_model_key_and_greedy_streaming() -> None:
    async with scripted_server(Script()) as server:
        await load.closed_loop(target(server, api_key="sk-1"), make_requests(1, 5), 1)
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 5, 0.0)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert server.headers[0]["Authorization"] == "Bearer sk-1"


async def test_tokens_come_from_usage_not_from_chunks() -> None:
    result = await one(Script(completion_tokens=9, chunk_delay_s=0.08))
    assert (result.completion_tokens, result.prompt_tokens) == (9, 7)
    assert result.token_source == "usage"
    assert len(result.gaps_s) == 1
    # Two chunks, nine tokens: the pause is shared by the eight tokens after the first.
    assert result.itl_s is not None
    assert result.itl_s == pytest.approx(result.gaps_s[0] / 8)
    assert result.text == " one two three"


async def test_ttft_is_the_first_text_not_the_role_event() -> None:
    result = await one(Script(first_delay_s=0.1))
    assert result.ttft_s is not None
    assert 0.1 <= result.ttft_s < 5.0


async def test_prompt_echo_is_no_first_token() -> None:
    result = await one(Script(first_delay_s=0.1, echo_prompt=True))
    assert result.echoed_prompt
    assert result.ttft_s is not None
    assert result.ttft_s >= 0.1
    assert "prompt 0" not in result.text


async def test_without_usage_text_is_read_back_and_said_to_be() -> None:
    result = await one(Script(send_usage=False), count_tokens=lambda text: len(text.split()))
    assert (result.completion_tokens, result.token_source) == (3, "retokenized")


async def test_usage_is_checked_against_the_text() -> None:
    script = Script(completion_tokens=9)
    async with scripted_server(script) as server:
        there = target(server, count_tokens=lambda text: len(text.split()))
        summary = summarise(await load.closed_loop(there, make_requests(2), 1), {0: 9, 1: 9})
    assert summary["completion_tokens"] == 18
    assert summary["reread_tokens"] == 6


async def test_without_usage_or_tokenizer_it_is_an_error() -> None:
    result = await one(Script(send_usage=False))
    assert result.error == "no usage in the stream and no tokenizer to count with"


async def test_missing_finish_reason_is_an_error() -> None:
    assert (await one(Script(finish_reason=""))).error == "stream ended without finish_reason"


async def test_error_event_after_text_is_an_error() -> None:
    assert (await one(Script(error_event=True))).error == "error event: worker_lost"


async def test_tokens_without_text_are_an_error() -> None:
    assert (await one(Script(chunks=[]))).error == "tokens in usage but no text in the stream"


async def test_a_timeout_is_an_error() -> None:
    assert (await one(Script(first_delay_s=5.0), timeout_s=0.1)).error == "timeout"


async def test_a_dead_server_is_an_error() -> None:
    run = await load.closed_loop(Target("t", "http://127.0.0.1:9", "m"), make_requests(2), 1)
    assert [r.error for r in run.results] == ["connection: ClientConnectorError"] * 2


async def test_errors_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    async with scripted_server(Script(fail_with={0: 429, 2: 500})) as server:
        run = await load.closed_loop(target(server), make_requests(4), 1)
    summary = summarise(run, dict.fromkeys(range(4), 3))
    assert summary["errors"] == {
        "http 429: rate_limit_exceeded": 1,
        "http 500: rate_limit_exceeded": 1,
    }
    assert (summary["num_requests"], summary["num_completed"]) == (4, 2)
    assert summary["completion_tokens"] == 6
    assert summary["ttft_s"] is not None
    assert summary["ttft_s"]["n"] == 2


async def test_short_answers_are_counted() -> None:
    async with scripted_server(Script(completion_tokens=2)) as server:
        run = await load.closed_loop(target(server), make_requests(3), 3)
    assert summarise(run, dict.fromkeys(range(3), 3))["num_short"] == 3
