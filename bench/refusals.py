"""How soon a server says no to bodies that nobody can answer.

    python -m bench.refusals --url http://127.0.0.1:8000 --model NAME --key KEY

Each body is sent `--repeats` times over one connection, one at a time; the time is from the first
byte sent to the whole answer. What is not refused with 400 or 413 is a failure of the server's.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from bench.stats import spread


def nested(depth: int, inner: Any, key: str = "properties") -> Any:
    """A schema so many levels deep."""
    for _ in range(depth):
        inner = {"type": "object", key: {"a": inner}} if key == "properties" else {key: inner}
    return inner


def bodies(model: str) -> dict[str, Any]:
    """By name. Text stays as it is, everything else becomes JSON."""
    chat = {"model": model, "messages": [{"role": "user", "content": "?"}]}

    def form(schema: Any) -> dict[str, Any]:
        answer = {"name": "a", "schema": schema}
        return {**chat, "response_format": {"type": "json_schema", "json_schema": answer}}

    def text(kind: str, key: str, value: str) -> dict[str, Any]:
        return {**chat, "response_format": {"type": kind, key: value}}

    branch = {"anyOf": [{"type": "string", "minLength": n} for n in range(40)]}
    wide = {f"p{n}": {"type": "string", "description": "x" * 80} for n in range(4000)}
    doubling: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"},
            "required": ["a", "b"],
        }
        for n in range(60)
    }
    doubling["d60"] = {"type": "null"}
    return {
        "temperature of -1": {**chat, "temperature": -1},
        "a token id outside the vocabulary": {**chat, "logit_bias": {"99999999": 1}},
        "max_tokens of a million": {**chat, "max_tokens": 1_000_000},
        "contradictory": {**chat, "max_tokens": 3, "min_tokens": 9},
        "half a megabyte of brackets": '{"model": "m", "messages": ' + "[" * 500_000,
        "half a megabyte of text": {
            **chat,
            "messages": [{"role": "user", "content": "x " * 250_000}],
        },
        "half a megabyte of schema": form({"type": "object", "properties": wide}),
        "half a megabyte of schema, exponential": form({"allOf": [branch] * 300}),
        "seven megabytes of tools": {**chat, "tools": [tool(n) for n in range(60)]},
        "a schema 40,000 levels deep": form_text(chat, 40_000),
        "a schema 60 levels deep": form(nested(60, {"type": "null"})),
        "allOf of anyOf": form({"allOf": [branch] * 6}),
        "references that double sixty times": form({"$defs": doubling, "$ref": "#/$defs/d0"}),
        "references in a circle": form(
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        ),
        "arrays in arrays": form(nested_arrays(6)),
        "nothing obeys it": form(
            {"type": "object", "properties": {"a": False}, "required": ["a", "b"]}
        ),
        "a keyword that cannot be held": form({"not": {"type": "string"}}),
        "a pattern that doubles": text("regex", "pattern", "(((((a{99}){99}){99}){99}){99})"),
        "a pattern with look-ahead": text("regex", "pattern", "(?=a)b"),
        "a pattern of a megabyte": text("regex", "pattern", "ab?" * 350_000),
        "a grammar without rules": text("grammar", "grammar", "start: nobody"),
        "a grammar that takes minutes": text("grammar", "grammar", costly_grammar()),
        "a grammar that doubles": text("grammar", "grammar", doubling_grammar()),
        "9 MiB": " " * (9 << 20),
    }


def form_text(chat: dict[str, Any], depth: int) -> str:
    """Deeper than Python's own encoder goes."""
    schema = '{"items": ' * depth + "{}" + "}" * depth
    answer = '{"type": "json_schema", "json_schema": {"name": "a", "schema": ' + schema + "}}"
    return json.dumps(chat)[:-1] + ', "response_format": ' + answer + "}"


def tool(number: int) -> dict[str, Any]:
    """A function whose schema is just within its own bound."""
    words = {"a": {"enum": [f"{n:06}" for n in range(12_000)]}}
    parameters = {"type": "object", "properties": words}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def nested_arrays(depth: int) -> Any:
    """Each level repeats the one below a hundred times."""
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 100, "maxItems": 100}
    return schema


def costly_grammar() -> str:
    """An intersection whose automaton has 2^40 states."""
    parts = " & ".join(f"/(.*a.{{{n}}}.*)/" for n in range(40))
    return f"start: T\nT: {parts}\n"


def doubling_grammar() -> str:
    """A terminal of 2^60 letters."""
    rules = "".join(f"T{n}: T{n + 1} T{n + 1}\n" for n in range(60))
    return f'start: T0\n{rules}T60: "b"\n'


async def measure(url: str, key: str, model: str, repeats: int = 5) -> dict[str, Any]:
    """By body: the statuses, the code, the first time and the spread of all, in seconds."""
    found: dict[str, Any] = {}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await _post(session, url, b"{}")  # the connection is made
        for name, body in bodies(model).items():
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            answers = [await _post(session, url, data) for _ in range(repeats)]
            times = [seconds for seconds, _, _ in answers]
            found[name] = {
                "bytes": len(data),
                "statuses": sorted({status for _, status, _ in answers}),
                "code": answers[0][2],
                "first_s": times[0],
                "s": spread(times),
            }
    return found


async def _post(session: aiohttp.ClientSession, url: str, data: bytes) -> tuple[float, int, str]:
    start_s = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", data=data) as response:
        answer = await response.json()
    return time.perf_counter() - start_s, response.status, answer.get("error", {}).get("code", "")


def main(argv: Sequence[str] | None = None) -> int:
    """A table; 1 where something was not refused."""
    parser = argparse.ArgumentParser(prog="python -m bench.refusals", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args.url, args.key, args.model, args.repeats))
    for name, row in found.items():
        figures = f"{row['first_s'] * 1e3:>9.1f}{row['s']['p50'] * 1e3:>9.1f}"
        print(f"{name:<42}{row['bytes']:>10}{figures} ms  {row['statuses']} {row['code']}")
    return 0 if all(set(row["statuses"]) <= {400, 413} for row in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
