"""Stage 2 beside HTTP: loading once, bounds that bite, defaults filled in."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.protocol import Constraint, SamplingParams
from gateway.api.output_plan import OutputPlan
from gateway.api.tool_types import (
    CalledFunction,
    FunctionSpec,
    JsonObjectFormat,
    ResponseFormat,
    Tool,
    ToolCall,
)
from gateway.api.wire import WireRequest
from gateway.auth.directory import Directory
from gateway.errors import ApiError
from gateway.prepare import prepare
from gateway.prepare.lengths import PrepareBounds
from gateway.prepare.prepare import Prepared, Preparer, RandomBytes
from gateway.text import tokenization
from gateway.text.codecs import Codecs
from gateway.text.prepare_messages import LoadText
from gateway.text.prepare_pool import PreparePool
from gateway.types import Principal
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import hosted_model, write_model
from tests.gateway.prepare_kit import InlinePool, shared_pool

WHO = Principal("ten", "key", frozenset({"inference"}), Limits())
ASK = WireRequest("completion", "tiny", prompt="The game")


def sampled(**fields: Any) -> WireRequest:
    return msgspec.structs.replace(ASK, sampling=SamplingParams(**fields))


def preparer(
    tmp_path: Path, *names: str, pool: PreparePool | None = None, **bounds: Any
) -> Preparer:
    write_model(tmp_path)
    directory = Directory()
    models = [hosted_model(tmp_path, name) for name in names or ("tiny",)]
    directory.replace(1, [], models)
    codecs = Codecs(pool or shared_pool(), max_codecs=2)
    return Preparer(directory, codecs, PrepareBounds(**{"default_max_tokens": 16, **bounds}))


async def prepared(stage: Preparer, asked: WireRequest = ASK) -> Prepared:
    return await stage.prepare(asked, WHO, {}, "cmpl-1", 1_700_000_000.9)


async def test_many_at_once_load_once(tmp_path: Path) -> None:
    pool = InlinePool()
    stage = preparer(tmp_path, pool=pool)
    results = await asyncio.gather(*(prepared(stage) for _ in range(6)))
    assert pool.count(LoadText) == 1
    assert len({id(result.codec) for result in results}) == 1
    assert results[0].request.created_at == 1_700_000_000
    assert results[0].request.max_tokens == 16


async def test_the_least_recently_used_codec_goes(tmp_path: Path) -> None:
    pool = InlinePool()
    stage = preparer(tmp_path, "a", "b", "c", pool=pool)
    for name in ("a", "b", "a", "c", "a", "b"):
        await prepared(stage, WireRequest("completion", name, prompt="x"))
    assert pool.count(LoadText) == 4


@pytest.mark.parametrize(
    ("num_models", "pinned", "num_read"), [(0, 0, 0), (2, 0, 2), (3, 0, 0), (3, 1, 1), (9, 3, 2)]
)
async def test_a_small_catalog_and_pinned_models_are_read_ahead(
    num_models: int, pinned: int, num_read: int, tmp_path: Path
) -> None:
    write_model(tmp_path)
    models = [
        replace(hosted_model(tmp_path, f"m{i}"), revision=f"r{i}", pinned=i >= num_models - pinned)
        for i in range(num_models)
    ]
    pool = InlinePool()
    codecs = Codecs(pool, max_codecs=4)
    await codecs.read_ahead(models)
    assert pool.count(LoadText) == num_read
    for model in models[num_models - max(pinned, num_read) :][:num_read]:
        await codecs.text(model)
    assert pool.count(LoadText) == num_read


async def test_no_more_are_read_ahead_than_are_kept(tmp_path: Path) -> None:
    write_model(tmp_path)
    models = [replace(hosted_model(tmp_path, name), revision=name) for name in ("a", "b")]
    pool = InlinePool()
    await Codecs(pool, max_codecs=1).read_ahead(models)
    assert not pool.jobs


async def test_reading_ahead_survives_a_tokenizer_that_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        write_model(folder)
    (broken / "tokenizer.json").write_text("{")
    pool = InlinePool()
    codecs = Codecs(pool, max_codecs=4)
    models = [
        replace(hosted_model(folder, folder.name), revision=folder.name)
        for folder in (broken, whole)
    ]
    await codecs.read_ahead(models)
    assert pool.count(LoadText) == 2
    assert "tokenizer of model broken is not read ahead" in caplog.text
    with pytest.raises(ApiError):
        await codecs.text(models[0])


async def test_a_caller_that_leaves_does_not_stop_the_load_for_others(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    first = asyncio.create_task(prepared(stage))
    await asyncio.sleep(0)
    second = asyncio.create_task(prepared(stage))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).request.prompt_token_ids


async def test_what_waits_is_bounded(tmp_path: Path) -> None:
    pool = PreparePool(1, max_pending=3)
    stage = preparer(tmp_path, pool=pool)
    await prepared(stage)
    results = await asyncio.gather(*(prepared(stage) for _ in range(5)), return_exceptions=True)
    errors = [result for result in results if isinstance(result, ApiError)]
    assert [(e.kind.code, e.retry_after_s) for e in errors] == [("queue_full", 1.0)] * 2
    assert sum(isinstance(result, Prepared) for result in results) == 3
    assert (await prepared(stage)).request.prompt_token_ids
    stage.close()


async def test_a_model_whose_files_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = preparer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ApiError) as caught:
        await prepared(stage)
    assert caught.value.kind.code == "model_failed"
    assert str(tmp_path) not in caught.value.message
    assert str(tmp_path) in caplog.text
    write_model(tmp_path)
    assert (await prepared(stage)).request.prompt_token_ids
    stage.close()


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        (WireRequest("completion", "tiny", prompt=""), "invalid_request", "prompt"),
        (WireRequest("completion", "tiny", prompt=(1, 403)), "invalid_request", "prompt"),
        (WireRequest("completion", "tiny", prompt=(-1,)), "invalid_request", "prompt"),
        (WireRequest("completion", "tiny", prompt=(1,) * 256), "context_length_exceeded", "prompt"),
        (WireRequest("completion", "tiny", prompt=(1,), max_tokens=256),
         "context_length_exceeded", "prompt"),
        (WireRequest("completion", "nobody", prompt="x"), "model_not_found", "model"),
    ],
)  # fmt: skip
async def test_refusals(tmp_path: Path, asked: WireRequest, code: str, param: str) -> None:
    stage = preparer(tmp_path)
    with pytest.raises(ApiError) as caught:
        await prepared(stage, asked)
    assert (caught.value.kind.code, caught.value.param) == (code, param)
    stage.close()


async def test_the_last_token_of_the_context_can_be_used(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    result = await prepared(stage, WireRequest("completion", "tiny", prompt=(1,) * 255))
    assert result.request.max_tokens == 1
    asked = WireRequest("completion", "tiny", prompt=(1,), max_tokens=255)
    assert (await prepared(stage, asked)).request.max_tokens == 255
    stage.close()


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system role') }}"])
async def test_templates_that_refuse(tmp_path: Path, template: str | None) -> None:
    stage = preparer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    messages: Any = ({"role": "user", "content": "x"},)
    with pytest.raises(ApiError) as caught:
        await prepared(stage, WireRequest("chat", "tiny", messages=messages))
    assert (caught.value.kind.status, caught.value.param) == (400, "messages")
    assert ("no system role" if template else "/v1/completions") in caught.value.message
    stage.close()


async def test_seeds_are_explicit_from_here_on(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    seeds = set()
    for seed in (None, None, 0, 7, -1, 2**70 + 7):
        asked = WireRequest("completion", "tiny", prompt="x", seed=seed)
        drawn = (await prepared(stage, asked)).request.sampling.seed
        assert 0 <= drawn < 2**63
        seeds.add(drawn)
    assert {0, 7, 2**63 - 1} < seeds
    assert len(seeds) == 5
    stage.close()


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        (msgspec.structs.replace(ASK, n=3), "invalid_request", "n"),
        (sampled(logit_bias={403: 1.0}), "invalid_request", "logit_bias"),
        (sampled(min_tokens=17), "invalid_request", "min_tokens"),
        (sampled(min_tokens=300), "context_length_exceeded", "prompt"),
        (WireRequest("chat", "tiny", messages=({"role": "user", "content": "x"},) * 300),
         "context_length_exceeded", "messages"),
        (msgspec.structs.replace(ASK, prompt=(1,) * 300), "context_length_exceeded", "prompt"),
    ],
)  # fmt: skip
async def test_refusals_before_any_text_is_read(
    tmp_path: Path, asked: WireRequest, code: str, param: str
) -> None:
    stage = preparer(tmp_path, max_choices=2)
    with pytest.raises(ApiError) as caught:
        await prepared(stage, asked)
    assert (caught.value.kind.code, caught.value.param) == (code, param)
    stage.close()


WORDS = "the cat sat on the mat "


@pytest.mark.parametrize("text", [WORDS * 100_000, "a" * 2_000_000, "<|im_end|>" * 200_000])
@pytest.mark.parametrize("place", ["prompt", "user", "assistant", "tool"])
async def test_absurd_lengths_are_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, place: str
) -> None:
    stage = preparer(tmp_path, pool=InlinePool())
    num_chars = 0
    encode = tokenization._encode

    def counted_encode(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        nonlocal num_chars
        num_chars += len(text)
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(tokenization, "_encode", counted_encode)
    messages: list[Any] = [{"role": "user", "content": "x"}]
    tools: tuple[Tool, ...] = ()
    asked = msgspec.structs.replace(ASK, prompt=text)
    if place == "tool":
        tools = (Tool(type="function", function=FunctionSpec(name="f", description=text)),)
    elif place != "prompt":
        messages.append({"role": place, "content": text})
    if place != "prompt":
        asked = WireRequest("chat", "tiny", messages=tuple(messages), tools=tools)
        (tmp_path / "chat_template.jinja").write_text(HERMES)
    with pytest.raises(ApiError) as caught:
        await prepared(stage, asked)
    assert caught.value.kind.code == "context_length_exceeded"
    assert num_chars < 50_000
    stage.close()


HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


async def test_what_is_asked_of_sampling_and_scores(tmp_path: Path) -> None:
    stage = preparer(tmp_path, max_choices=2)
    request = (
        await prepared(
            stage,
            msgspec.structs.replace(ASK, n=2, logprobs=3, echo=True, ignore_eos=True, max_tokens=0),
        )
    ).request
    assert (request.num_choices, request.logprobs, request.prompt_logprobs) == (2, 3, 3)
    assert (request.echoes, request.only_prompt, request.max_tokens) == (("The game",), True, 1)
    assert request.stop_token_ids == []
    ids = tuple(request.prompt_token_ids)
    request = (await prepared(stage, msgspec.structs.replace(ASK, prompt=ids, echo=True))).request
    assert (request.echoes, request.prompt_logprobs, request.only_prompt) == (
        ("The game",),
        -1,
        False,
    )
    stage.close()


async def test_a_last_message_is_continued(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"})
    asked = WireRequest(
        "chat", "tiny", messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    result = await prepared(stage, asked)
    assert result.codec.decode(result.request.prompt_token_ids).endswith("assistant\nIt is")
    assert result.request.continues_text
    asked = msgspec.structs.replace(asked, continue_final_message=False)
    text = result.codec.decode((await prepared(stage, asked)).request.prompt_token_ids)
    assert text.endswith("It is\n")
    stage.close()


async def test_tools_and_forms_become_prompt_constraint_and_parser(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    offered = (Tool(type="function", function=FunctionSpec(name="f")),)
    call = ToolCall(id="c", function=CalledFunction(name="f", arguments='{"a": 1}'))
    messages = (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    )
    asked = WireRequest("chat", "tiny", messages=messages, tools=offered, tool_choice="required")
    result = await prepared(stage, asked)
    text = result.codec.decode(result.request.prompt_token_ids)
    assert '<tools>[{"type": "function", "function": {"name": "f"' in text
    assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
    assert result.request.constraint is not None
    parser = result.new_parser()
    parser.feed('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    parser.flush()
    assert parser.num_calls == 1
    fields: dict[str, dict[str, Any]] = {
        "min_tokens": {"sampling": SamplingParams(min_tokens=2)},
        "ignore_eos": {"ignore_eos": True},
    }
    for param, field in fields.items():
        with pytest.raises(ApiError) as caught:
            await prepared(stage, msgspec.structs.replace(asked, **field))
        assert caught.value.param == param
    form = msgspec.structs.replace(
        asked, tools=(), tool_choice=None, response_format=JsonObjectFormat()
    )
    assert (await prepared(stage, form)).request.constraint == Constraint("json_object")
    stage.close()


async def test_a_length_that_the_context_cuts_is_not_the_callers(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    asked = msgspec.structs.replace(
        ASK, prompt="a", caps_max_tokens=True, sampling=SamplingParams(temperature=0.0)
    )
    for max_tokens, named in ((5, True), (10_000, False), (None, False)):
        headers = {"x-polyhost-cache-mode": "exact"}
        one = msgspec.structs.replace(asked, max_tokens=max_tokens)
        made = await stage.prepare(one, WHO, headers, "cmpl-1", 0.0)
        assert made.turn is not None
        assert made.turn.names_length is named
    stage.close()


async def test_scores_of_several_answers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "MAX_SCORES", 18)
    stage = preparer(tmp_path, max_choices=2)
    asked = msgspec.structs.replace(ASK, prompt=(1, 2), more_prompts=((3,),))
    allowed: list[dict[str, Any]] = [
        {"echo": True, "logprobs": 5},
        {"echo": True, "logprobs": 2, "n": 2},
        {"prompt_logprobs": 5},
        {"logprobs": 20},
    ]
    for fields in allowed:
        await prepared(stage, msgspec.structs.replace(asked, **fields))
    refused: list[dict[str, Any]] = [
        {"echo": True, "logprobs": 6},
        {"echo": True, "logprobs": 3, "n": 2},
        {"prompt_logprobs": 6},
    ]
    for fields in refused:
        with pytest.raises(ApiError, match="prompt has 3 tokens in all"):
            await prepared(stage, msgspec.structs.replace(asked, **fields))
    one = msgspec.structs.replace(asked, prompt=(1, 2, 3), more_prompts=())
    await prepared(
        stage, msgspec.structs.replace(one, echo=True, logprobs=6)
    )  # bounded by the context
    await prepared(stage, msgspec.structs.replace(one, prompt_logprobs=2, n=2))
    with pytest.raises(ApiError, match="in every answer it may have 2"):
        await prepared(stage, msgspec.structs.replace(one, prompt_logprobs=3, n=2))
    await prepared(stage, msgspec.structs.replace(ASK, prompt=(1, 2, 3), prompt_logprobs=20))
    stage.close()


async def test_the_form_of_several_prompts_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, planned = preparer(tmp_path), list[ResponseFormat]()
    plan = prepare._completion_form

    def counted(form: ResponseFormat) -> OutputPlan:
        planned.append(form)
        return plan(form)

    monkeypatch.setattr(prepare, "_completion_form", counted)
    form = JsonObjectFormat()
    asked = msgspec.structs.replace(
        ASK, prompt=(1,), more_prompts=((2,), "a"), response_format=form
    )
    made = await prepared(stage, asked)
    assert (planned, made.request.constraint) == ([form], Constraint("json_object"))
    stage.close()


async def test_lengths_that_the_operator_limits(tmp_path: Path) -> None:
    stage = preparer(tmp_path)
    who = msgspec.structs.replace(WHO, limits=Limits(max_prompt_tokens=2, max_output_tokens=9))

    async def ask(**fields: Any) -> Prepared:
        asked = msgspec.structs.replace(ASK, prompt=(1, 2), **fields)
        return await stage.prepare(asked, who, {}, "cmpl-1", 0.0)

    assert (await ask()).request.max_tokens == 9  # less than the default of 16
    assert (await ask(max_tokens=9)).request.max_tokens == 9
    for fields, said in (
        ({"max_tokens": 10}, "your limit of 9"),
        ({"prompt": (1, 2, 3)}, "prompt has 3 tokens, more than your limit of 2"),
        ({"prompt": (1,), "more_prompts": ((1,), (2,))}, "prompt has 3 tokens"),
    ):
        with pytest.raises(ApiError, match=said) as caught:
            await stage.prepare(msgspec.structs.replace(ASK, **fields), who, {}, "cmpl-1", 0.0)
        assert caught.value.kind.status == 400


def test_no_byte_is_given_out_twice() -> None:
    numbers = itertools.count()
    made: list[bytes] = []

    def source(num_bytes: int) -> bytes:
        made.append(b"".join(next(numbers).to_bytes(4, "big") for _ in range(num_bytes // 4)))
        return made[-1]

    random = RandomBytes(source)
    taken = [random.take(size) for _ in range(500) for size in (16, 8, 4)]
    assert {len(piece) for piece in taken} == {16, 8, 4}
    words = [piece[at : at + 4] for piece in taken for at in range(0, len(piece), 4)]
    assert len(set(words)) == len(words)
    assert len(made) == 4


def test_two_of_them_have_nothing_in_common() -> None:
    first, second = RandomBytes(), RandomBytes()
    assert not {first.take(16) for _ in range(300)} & {second.take(16) for _ in range(300)}
