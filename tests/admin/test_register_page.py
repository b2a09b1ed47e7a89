"""The check of a registration: what is cheap to see comes first, and it says what it does."""

import json
import re

import pytest

from admin.registration import preflight
from admin.registration.preflight import Preflight
from admin.registration.register_process import RegisterEvent
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
