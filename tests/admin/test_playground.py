"""The playground without a browser: who may, what is sent, what comes back, what it was billed."""

import json
import re
import time
import urllib.parse
import urllib.request

import pytest

from gateway.dispatch.tickets import RequestStream
from registry.accounts import api_keys, tenants
from registry.money import ledger
from registry.money.ledger import Posting
from tests.admin.site import Site, Visitor, form_of
from tests.gateway.edge_kit import Running, key_record, parse_events

TEXT = "The game is afoot!"


@pytest.fixture(scope="module")
def key_id(site: Site) -> str:
    """A key in the registry that the scripted gateway lets in, too."""
    site.add_model("tiny")
    site.add_model("embedder", task="embed", dim=384)
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        tenant = tenants.create_tenant(session, "acme", now_at=now_at)
        record, _ = api_keys.create_key(session, tenant.id, "first", now_at=now_at)
    kit = site.kit
    known = key_record(key_id=record.id, tenant_id=tenant.id)
    kit.directory.replace(2, [known], [kit.model])
    return record.public_id


@pytest.fixture(scope="module")
def ann(site: Site, key_id: str) -> Visitor:
    del key_id
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")
    return site.visitor("ann")


def answers(site: Site, text: str = TEXT) -> None:
    """The worker says this to whoever asks."""

    def script(running: Running) -> None:
        running.say(site.kit.tokenizer.encode(text).ids)
        running.end("stop")

    site.kit.dispatcher.script = script


def fields(key_id: str, **changes: str) -> dict[str, str]:
    found = {"model": "tiny", "beside": "", "key": key_id, "system": "", "temperature": "0.5",
             "max_tokens": "8", "prompt": "What is afoot?"}  # fmt: skip
    return {**found, **changes}


def key_asked_as(page: str) -> str:
    (value,) = re.findall(r'name="key" type="text" value="([^"]*)"', page)
    return str(value)


def test_a_key_of_an_internal_tenant_is_filled_in_and_no_customers(
    site: Site, ann: Visitor, key_id: str
) -> None:
    assert key_asked_as(ann.get("/playground").text) == "", "acme is a customer"
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        own = tenants.create_tenant(session, "own", internal=True, now_at=now_at)
        asks, secret = api_keys.create_key(session, own.id, "asks", now_at=now_at)
        api_keys.create_key(session, own.id, "reads", scopes=("usage",), now_at=now_at + 1)
        api_keys.create_key(session, tenants.get_tenant(session, "acme").id, "newest",
                            now_at=now_at + 2)  # fmt: skip
    page = ann.get("/playground").text
    assert key_asked_as(page) == asks.public_id
    assert secret not in page
    assert key_asked_as(ann.get(f"/playground?key={key_id}").text) == key_id
    page = ann.get(f"/tenants/{own.id}").text
    fields = form_of(page, f"/tenant/change/{own.id}")
    assert fields.pop("internal") == "1"
    assert "Saved" in ann.post(f"/tenant/change/{own.id}", fields).text
    assert key_asked_as(ann.get("/playground").text) == ""
    assert site.visitor("vera").get("/playground").status == 403


def test_one_prompt_is_asked_as_the_key_and_answered(site: Site, ann: Visitor, key_id: str) -> None:
    answers(site)
    asked = fields(key_id, system="Be Sherlock.")
    page = ann.post("/playground", asked)
    assert page.status == 200
    assert TEXT in page.text
    running = site.kit.dispatcher.requests[-1]
    assert running.principal.tenant_id != "ten_1"
    assert running.request.max_tokens == 8
    assert running.request.sampling.temperature == 0.5
    prompt = site.kit.tokenizer.decode(running.request.prompt_token_ids)
    assert "Be Sherlock." in prompt
    assert "What is afoot?" in prompt


def test_two_models_are_asked_side_by_side(site: Site, ann: Visitor, key_id: str) -> None:
    answers(site)
    before = len(site.kit.dispatcher.requests)
    page = ann.post("/playground", fields(key_id, beside="not-there")).text
    assert len(site.kit.dispatcher.requests) == before + 1
    assert TEXT in page
    assert "model_not_found" in page, "the other one's error stands at its side"


def test_an_answer_is_streamed_with_what_was_said_before(
    site: Site, ann: Visitor, key_id: str
) -> None:
    answers(site)
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    answer = ann.post("/playground/stream", fields(key_id, history=json.dumps(history)))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.body)
    assert events[-1] == "[DONE]"
    said = [e["choices"][0]["delta"].get("content", "") for e in events[:-1] if e["choices"]]
    assert "".join(filter(None, said)) == TEXT
    assert events[-2]["usage"]["completion_tokens"] > 0
    prompt = site.kit.tokenizer.decode(site.kit.dispatcher.requests[-1].request.prompt_token_ids)
    assert "Yes?" in prompt


def test_what_goes_wrong_comes_as_an_event(site: Site, ann: Visitor, key_id: str) -> None:
    events = parse_events(ann.post("/playground/stream", fields(key_id, model="none")).body)
    assert events[-1]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt": " "}, "Prompt is required"),
        ({"temperature": "3"}, "At most 2"),
        ({"max_tokens": "0"}, "at least 1"),
        ({"key": "key_none"}, "unknown key"),
        ({"history": "[1]"}, "could not be read"),
        ({"history": '[{"role": "system", "content": "x"}]'}, "Start a new one"),
        ({"history": '[{"role": "user", "content": "x"}]' * 9}, "could not be read"),
    ],
)
def test_what_is_wrong_with_a_form_is_said(
    site: Site, ann: Visitor, key_id: str, changes: dict[str, str], told: str
) -> None:
    before = len(site.kit.dispatcher.requests)
    for path in ("/playground", "/playground/stream"):
        answer = ann.post(path, fields(key_id, **changes))
        assert answer.status == 422, path
        assert told in answer.text
    assert len(site.kit.dispatcher.requests) == before


def test_it_is_for_those_who_may_change_keys_and_see_models(
    site: Site, ann: Visitor, key_id: str
) -> None:
    del ann
    before = len(site.kit.dispatcher.requests)
    for name in ("vera", "tom"):
        visitor = site.visitor(name)
        assert visitor.get("/playground").status == 403
        assert "/admin/playground" not in visitor.get("/account").text
        for path in ("/playground", "/playground/stream"):
            assert visitor.post(path, fields(key_id)).status == 403, (name, path)
    assert len(site.kit.dispatcher.requests) == before


def test_without_its_token_nothing_is_asked(site: Site, ann: Visitor, key_id: str) -> None:
    before = len(site.kit.dispatcher.requests)
    assert ann.post("/playground/stream", fields(key_id), csrf="00" * 64).status == 403
    foreign = ann.post("/playground/stream", fields(key_id), origin="http://elsewhere.example")
    assert foreign.status == 403
    assert len(site.kit.dispatcher.requests) == before


def test_a_receipt_is_what_the_ledger_says_and_its_tenants_alone(
    site: Site, ann: Visitor, key_id: str
) -> None:
    assert ann.get("/playground/receipt/chatcmpl-none").status == 204
    with site.operator.writing() as session:
        key = api_keys.get_key(session, key_id)
        posting = Posting(
            "chatcmpl-one", key.tenant_id, key.id, "tiny", "rev", "chat", "finished",
            12, 4, 30, 123_456, 0.1, 0.25, 0.5, 1.5, site.operator.clock(),
        )  # fmt: skip
        ledger.post_many(session, [posting])
        other = tenants.create_tenant(session, "other", now_at=site.operator.clock())
        theirs = Posting(
            "chatcmpl-two", other.id, key.id, "tiny", "rev", "chat", "finished",
            1, 0, 1, 1, 0.1, 0.0, 0.5, 1.5, site.operator.clock(),
        )  # fmt: skip
        ledger.post_many(session, [theirs])
    text = ann.get("/playground/receipt/chatcmpl-one").text
    for part in (
        "12 input tokens (4 cached), 30 output tokens",
        "0.000123",
        "250 ms in the queue",
        "1.5 s total",
    ):
        assert part in text
    tom = site.visitor("tom")
    assert tom.get("/playground/receipt/chatcmpl-one").status == 200
    assert tom.get("/playground/receipt/chatcmpl-two").status == 204


def test_who_leaves_a_stream_stops_the_request(site: Site, ann: Visitor, key_id: str) -> None:
    def script(running: Running) -> None:
        running.say(site.kit.tokenizer.encode("The game").ids)

    site.kit.dispatcher.script = script
    try:
        data = {**fields(key_id), "csrf": ann.get("/account").csrf}
        request = urllib.request.Request(
            site.url + "/admin/playground/stream", urllib.parse.urlencode(data).encode()
        )
        for name, value in {
            "origin": site.url,
            "cookie": "; ".join(f"{n}={v}" for n, v in ann.cookies.items()),
        }.items():
            request.add_header(name, value)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.read(6) == b"data: "
        running = site.kit.dispatcher.requests[-1]
        assert isinstance(running.stream, RequestStream)
        ends_s = time.monotonic() + 10
        while not running.aborted and time.monotonic() < ends_s:
            time.sleep(0.02)
        assert running.aborted
    finally:
        answers(site)
