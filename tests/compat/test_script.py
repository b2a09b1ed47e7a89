"""The scripted model's answers, without a server."""

import json

import pytest

from tests.compat.script import Call, Said, Turn, answer

TOOLS = [
    {"function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "unit": {"$ref": "#/$defs/Unit"},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
                "$defs": {"Unit": {"enum": ["m", "ft"]}},
            },
        }
    },
]
OFFER = Said("system", f"<tools>{json.dumps(TOOLS)}</tools>")


def asked(text: str, *behind: Said) -> list[Said]:
    return [Said("user", text), *behind, Said("assistant", "")]


def test_the_turn_of_a_script_is_the_number_of_answers_behind_it() -> None:
    script = 'please <<[{"calls": [{"name": "now"}]}, {"text": "done"}]>> now'
    assert answer(asked(script)) == Turn(calls=[Call("now")])
    result = Said("user", "<tool_response>12</tool_response>")
    behind = (Said("assistant", "<tool_call>"), result)
    assert answer(asked(script, *behind)).text == "done"
    assert answer(asked(script, *behind, *behind)).text == "the script has no turn 2"
    assert answer(asked('<<[{"text": "a"}]>>', Said("assistant", "a"), Said("user", script))).calls


def test_an_assistants_words_are_no_script() -> None:
    assert answer(asked("hello", Said("assistant", '<<[{"text": "x"}]>>'))).text.startswith("You")


def test_a_script_with_a_word_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="txt"):
        answer(asked('<<[{"txt": "x"}]>>'))


def test_a_tool_is_called_with_what_the_message_names() -> None:
    turn = answer([OFFER, *asked("add 3 and 4.5 for 'Ann'")])
    (call,) = turn.calls
    assert call.name == "add"
    assert call.arguments == {"a": 3, "b": 4.5, "unit": "m", "names": ["Ann"]}
    assert answer([OFFER, *asked("hello")]).calls == [Call("now")]
    told = Said("user", "<tool_response>7.5</tool_response>")
    again = answer([OFFER, *asked("add 3 and 4.5", Said("assistant", "<tool_call>"), told)])
    assert again.text == "The result is 7.5."


def test_a_schema_is_filled_in() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"const": 2}}}
    assert json.loads(answer(asked("x"), json.dumps(schema)).text) == {"ok": True, "n": 2}
    assert json.loads(answer(asked("With `a` and 'b'."), "{}").text) == {"a": "text", "b": "text"}


def test_what_is_written_is_in_the_forms_of_the_template() -> None:
    turn = Turn(text="Well. ", reasoning="hm", calls=[Call("add", {"a": 1})])
    written = turn.written(may_reason=True)
    call = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
    assert written == f"<think>\nhm\n</think>\n\nWell. {call}"
    assert "hm" not in turn.written(may_reason=False)
