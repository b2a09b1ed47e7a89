"""The check of a registration: what is cheap to see comes first, and it says what it does."""

import json
import re
from dataclasses import replace

import msgspec
import pytest

from admin.registration import preflight
from admin.registration.preflight import Preflight
from admin.registration.register_process import HostingOption, HubModel, RegisterEvent
from tests.admin.site import Answer, Site, Visitor

ASKED = {"name": "new", "source": "/new", "dtype": "auto"}


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    site.add_model("tiny")
    return site.visitor("ann")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources that were looked at; each takes two phases."""
    seen: list[str] = []

    def look(context: object, source: str, *_: object, report: object = None) -> Preflight:
        seen.append(source)
        for phase in ("start", "resolve"):
            if callable(report):
                report(phase)
        return Preflight("/new", RegisterEvent("preflight", "/new", weight_bytes=1 << 20))

    monkeypatch.setattr(preflight, "look", look)
    return seen


def focused(answer: Answer) -> list[str]:
    return re.findall(r'id="f-(\w+)"[^>]* autofocus', answer.text)


@pytest.mark.parametrize(
    ("name", "said"), [("tiny", "already exists"), ("bad name!", "must begin with a letter")]
)
def test_a_name_that_cannot_be_is_said_before_anything_is_looked_at(
    ann: Visitor, looks: list[str], name: str, said: str
) -> None:
    for path in ("/register/check", "/register"):
        answer = ann.post(path, {**ASKED, "name": name})
        assert answer.status in (409, 422)
        error = re.findall(r'id="f-name-help"><strong class="error">([^<]*)', answer.text)
        assert error, path
        assert said in error[0]
        assert focused(answer) == ["name"]
    assert looks == []


def test_the_focus_is_on_the_field_that_is_wrong(ann: Visitor, looks: list[str]) -> None:
    assert focused(ann.post("/register/check", {**ASKED, "source": ""})) == ["source"]
    assert focused(ann.post("/register/check", {**ASKED, "dtype": "int3"})) == ["dtype"]
    assert focused(ann.post("/key/add", {"name": "x", "tenant": "none"})) == ["inference"]
    assert focused(ann.get("/register")) == ["name"]
    assert looks == []


def test_a_check_says_what_it_does(ann: Visitor, looks: list[str]) -> None:
    answer = ann.post("/register/check", ASKED, accept="text/event-stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    told = [(name[7:], json.loads(data[6:])) for name, data in blocks]
    words = ["starting", "asking the hub for the commit"]
    assert told[:-1] == [("phase", text) for text in words]
    assert told[-1][0] == "page"
    assert "Register</button>" in told[-1][1]
    assert looks == ["/new"]


def test_a_refusal_comes_by_the_stream_too(ann: Visitor, site: Site, looks: list[str]) -> None:
    taken = ann.post("/register/check", {**ASKED, "name": "tiny"}, accept="text/event-stream")
    assert "already exists" in taken.text
    site.add_user("vera", "viewer")
    vera = site.visitor("vera")
    assert vera.post("/register/check", ASKED, accept="text/event-stream").status == 403
    assert looks == []


CHOICES = [
    HostingOption("bfloat16", 4 << 30, 0.0, 128 << 20, False),
    HostingOption("int8", 2 << 30, 0.009, 128 << 20, True),
    HostingOption("int4", 1 << 30, 0.082, 128 << 20, True),
]
FOUND = RegisterEvent(
    "preflight", "acme/m", family="gemma3_text", architecture="Gemma3ForCausalLM",
    wrapper="gemma3", num_parameters=4_300_000_000, dtype="bfloat16", weight_bytes=4 << 30,
    max_context=131_072, download_bytes=8 << 30, pack_bytes=4 << 30, free_bytes=50 << 30,
    choices=CHOICES,
)  # fmt: skip
SEEN = Preflight("acme/m", FOUND, hub=HubModel("acme/m", license="gemma", gated="manual"))


def chosen(answer: Answer) -> list[str]:
    return re.findall(r'name="dtype" value="(\w+)" checked', answer.text)


def see(monkeypatch: pytest.MonkeyPatch, seen: Preflight) -> None:
    monkeypatch.setattr(preflight, "look", lambda *_, **__: seen)


def test_a_check_shows_what_the_model_is_and_each_dtype(
    ann: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, SEEN)
    answer = ann.post("/register/check", ASKED)
    facts = ("Gemma3ForCausalLM", "4.3 billion", "text part of gemma3", "gemma", "authors decide")
    for fact in (*facts, "128 MiB", "8.2 %", "1.0 GiB"):
        assert fact in answer.text, fact
    assert chosen(answer) == ["auto"]
    assert '<select id="f-dtype"' not in answer.text
    see(monkeypatch, replace(SEEN, found=msgspec.structs.replace(FOUND, dtype="int8")))
    assert chosen(ann.post("/register/check", {**ASKED, "dtype": "int8"})) == ["int8"]
    # float16 is none of the choices: the list of all stays.
    see(monkeypatch, replace(SEEN, found=msgspec.structs.replace(FOUND, dtype="float16")))
    answer = ann.post("/register/check", {**ASKED, "dtype": "float16"})
    assert chosen(answer) == []
    assert '<select id="f-dtype"' in answer.text


def test_a_model_that_is_too_large_is_offered_in_what_fits(
    ann: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, replace(SEEN, code="too_large", reason="more than device_budget_bytes"))
    answer = ann.post("/register/check", ASKED)
    assert chosen(answer) == ["int8"]
    assert "Check again</button>" in answer.text
    assert "Register</button>" not in answer.text


def test_a_refused_model_is_described(ann: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    said = RegisterEvent("described", "m", model_type="nonsense", architecture="NonsenseModel")
    seen = Preflight("m", code="unknown_family", reason="is not supported", described=said)
    see(monkeypatch, replace(seen, hub=HubModel("m", num_parameters=7_000_000)))
    text = ann.post("/register/check", ASKED).text
    for fact in (
        "nonsense",
        "NonsenseModel",
        "7.0 million",
        "stated by the hub",
        "not stated",
        "open",
    ):
        assert fact in text, fact
