"""What the scripted model answers: pure, from the token ids of a prompt to the text of the answer.

A user's message may hold a script, a JSON list between `<<` and `>>` with one object a turn of the
assistant:

    text, reasoning, calls   what it says; a call is {"name": ..., "arguments": {...}}
    goes_on                  it says its text again and again until `max_tokens`
    wait_s, pace_s           seconds before the first tokens, and between tokens
    die                      so many attempts end with the worker's process, half-way through
    error                    it ends as the engine's errors do

The last script in the prompt counts, and its turn is the number of the assistant's messages behind
it. So a client's loop goes through it, whatever the client puts in between.

A prompt without a script is answered simply: a result of a tool is repeated, a schema is filled in,
a tool that is offered is called, and any other message is repeated. Numbers and quoted texts of the
message become arguments; where any object will do, the quoted texts are its names.

TEMPLATE is the chat template that goes with it: Hermes' tool calls, and reasoning in <think>.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

TEMPLATE = """{{- bos_token -}}
{%- if tools -%}
    {{- '<|system|><tools>' + tools | tojson + '</tools><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ('system', 'developer') -%}
        {{- '<|system|>' + message.content + '<|end|>' -}}
    {%- elif message.role == 'user' -%}
        {{- '<|user|>' + message.content + '<|end|>' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>' -}}
    {%- else -%}
        {{- '<|assistant|>' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- message.content or '' -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
SCRIPT = re.compile(r"<<(\[.*?\])>>", re.DOTALL)
TOOLS = re.compile(r"<tools>(.*)</tools>", re.DOTALL)
RESULT = re.compile(r"<tool_response>(.*)</tool_response>", re.DOTALL)
QUOTED = re.compile(r"([\"'`])(.+?)\1")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MAX_DEPTH = 6


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any] = {}


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One answer; see the module's docstring."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    goes_on: bool = False
    wait_s: float = 0.0
    pace_s: float = 0.0
    die: int = 0
    error: str = ""

    def written(self, may_reason: bool) -> str:
        """As the model writes it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n"
        calls = [
            f"<tool_call>\n{msgspec.json.encode(call).decode()}\n</tool_call>"
            for call in self.calls
        ]
        return (thought if self.reasoning and may_reason else "") + self.text + "\n".join(calls)


class Said(msgspec.Struct, frozen=True):
    """One message of a prompt: its role and its text."""

    role: str
    text: str


def answer(said: list[Said], schema: str = "") -> Turn:
    """The next turn. `schema`: JSON that the answer has to obey, as text; "" for none.

    `said` ends with the message that the assistant is to write, which may have begun.
    """
    before = said[:-1] if said and said[-1].role == "assistant" else said
    for at in reversed(range(len(before))):
        found = SCRIPT.search(before[at].text) if before[at].role == "user" else None
        if found is not None:
            turns = msgspec.json.decode(found[1], type=list[Turn])
            number = sum(one.role == "assistant" for one in before[at + 1 :])
            missing = Turn(text=f"the script has no turn {number}")
            return turns[number] if number < len(turns) else missing
    return _simple(before, schema)


def _simple(said: list[Said], schema: str) -> Turn:
    text = said[-1].text if said else ""
    result = RESULT.fullmatch(text.strip())
    if result is not None:
        return Turn(text=f"The result is {result[1]}.")
    if schema:
        form = json.loads(schema)
        if not form.get("properties") and form.get("type", "object") == "object":
            return Turn(text=json.dumps(dict.fromkeys(_values(text)[1], "text")))
        return Turn(text=json.dumps(_filled(form, form, *_values(text))))
    offered = next((found for one in said if (found := TOOLS.search(one.text))), None)
    if offered is not None:
        tools = [tool["function"] for tool in json.loads(offered[1])]
        tool = next((tool for tool in tools if tool["name"] in text), tools[0])
        form = tool.get("parameters") or {}
        return Turn(calls=[Call(tool["name"], _filled(form, form, *_values(text)) or {})])
    return Turn(text=f"You said: {text}")


def _values(text: str) -> tuple[Iterator[float], Iterator[str]]:
    numbers = (float(found) for found in NUMBER.findall(text))
    return numbers, (quoted for _, quoted in QUOTED.findall(text))


def _filled(
    form: Any, root: Any, numbers: Iterator[float], texts: Iterator[str], depth: int = 0
) -> Any:
    """A value of the schema; numbers and texts are used up in their order."""
    if not isinstance(form, dict) or depth > MAX_DEPTH:
        return None
    if "$ref" in form:
        target = root
        for name in form["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return _filled(target, root, numbers, texts, depth + 1)
    for several in ("anyOf", "oneOf", "allOf"):
        if form.get(several):
            return _filled(form[several][0], root, numbers, texts, depth + 1)
    if "const" in form:
        return form["const"]
    if form.get("enum"):
        return form["enum"][0]
    kind = form.get("type", "object" if "properties" in form else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {
            name: _filled(part, root, numbers, texts, depth + 1)
            for name, part in form.get("properties", {}).items()
        }
    if kind == "array":
        return [_filled(form.get("items", {}), root, numbers, texts, depth + 1)]
    if kind == "integer":
        return int(next(numbers, 1.0))
    plain = {"number": next(numbers, 1.0) if kind == "number" else 0, "boolean": True, "null": None}
    return plain[kind] if kind in plain else next(texts, "text")
