"""Chats for the demo models, built from the text they are trained on.

Second stage of `bench/train_demo.py`: in goes a text, out come chats whose questions are openings
of or words from the answers, and whose answers end where a speech, paragraph or function ends.
Also here, so that both say the same: how a chat is written down, in training (`render`) and in
serving (`CHAT_TEMPLATE`). What is not here: token ids, files.

Every random choice comes from the `random.Random` passed in.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOS, EOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
# Renders BOS itself: callers encode the result without special tokens. An assistant's text is not
# trimmed, so that a conversation sent back renders to the ids once generated, and a prefix cache
# still holds them.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] in ('system', 'developer') -%}
        {{- '<|system|>' + message['content'] | trim + '<|end|>' -}}
    {%- elif message['role'] in ('user', 'tool') -%}
        {{- '<|user|>' + message['content'] | trim + '<|end|>' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- '<|assistant|>' + (message['content'] or '') + '<|end|>' -}}
    {%- else -%}
        {{- raise_exception('Unknown role: ' + message['role']) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""
# About 150 tokens at the three bytes a token that these vocabularies reach.
MAX_ANSWER_CHARS = 440
MAX_OPENING_CHARS = 160

_PROMPTS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("demo_prompts.json").read_text("utf-8")
)
SYSTEM_PROMPTS, GENERIC_PROMPTS = _PROMPTS["system"], _PROMPTS["generic"]
TOPIC_PROMPTS, CONTINUE_PROMPTS = _PROMPTS["topic"], _PROMPTS["continue"]
CODE_TOPIC_PROMPTS, CODE_GENERIC_PROMPTS = _PROMPTS["code_topic"], _PROMPTS["code_generic"]
STOP_WORDS = frozenset(_PROMPTS["stop_words"])
"""Words of four letters and more that name no topic; a question on one would teach nothing."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange; `assistant` ends at a natural end."""

    user: str
    assistant: str


def render(system: str | None, turns: list[Turn]) -> str:
    """The text that `CHAT_TEMPLATE` gives; `check_template` holds the two together."""
    head = BOS + (f"{SYSTEM}{system}{END}" if system else "")
    return head + "".join(f"{USER}{t.user}{END}{ASSISTANT}{t.assistant}{END}" for t in turns)


def check_template(tokenizer: Any) -> None:
    """Raise ValueError where a saved tokenizer's template and the training rows disagree."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    if rendered != render("Be brief.", [Turn("One", "Two")]):
        raise ValueError(f"chat template renders {rendered!r}")


def code_chats(files: list[str], rng: random.Random) -> Iterator[str]:
    """Endless rendered chats about the functions in Python `files`."""
    functions = [function for source in files for function in find_functions(source)]
    return _chats(lambda: code_turns(functions, rng), rng)


def prose_chats(text: str, rng: random.Random) -> Iterator[str]:
    """Endless rendered chats about a text of speeches or paragraphs with empty lines between."""
    units = [unit.strip("\n") for unit in text.split("\n\n") if unit.strip()]
    return _chats(lambda: prose_turns(units, rng), rng)


def _chats(make_turns: Callable[[], list[Turn]], rng: random.Random) -> Iterator[str]:
    while True:
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
        yield render(system, make_turns())


def prose_turns(units: list[str], rng: random.Random) -> list[Turn]:
    """One to three exchanges over consecutive `units`, starting at any of them."""
    at = rng.randrange(len(units))
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3), (0.75, 0.18, 0.07))[0]):
        if turns and rng.random() < 0.5:
            user = rng.choice(CONTINUE_PROMPTS)
            answer, at = take_passage(units, at, rng)
        elif rng.random() < 0.45:
            user, rest = split_opening(units[at], rng)
            answer, at = take_passage(units, (at + 1) % len(units), rng, rest)
        else:
            answer, at = take_passage(units, at, rng)
            user = topic_prompt(answer, rng) if rng.random() < 0.8 else rng.choice(GENERIC_PROMPTS)
        turns.append(Turn(user, answer))
    return turns


def split_opening(unit: str, rng: random.Random) -> tuple[str, str]:
    """Cut a speech after its first line, a paragraph after its first sentence: (opening, rest)."""
    speaker, _, speech = unit.partition(":\n")
    if speech and len(speaker) < 40:
        head, _, rest = speech.partition("\n")
        opening = head if rng.random() < 0.5 else f"{speaker}:\n{head}"
    else:
        opening, rest = first_sentence(unit)
    return opening[:MAX_OPENING_CHARS].strip(), rest.strip()


def first_sentence(text: str) -> tuple[str, str]:
    """(first sentence, the rest); a text without an inner sentence end is all first sentence."""
    # The look-behinds keep titles from ending a sentence.
    titles = r"(?<!\bMr)(?<!\bDr)(?<!\bMrs)(?<!\bSt)"
    match = re.search(titles + r"[.!?]\"?\s+", text[: MAX_OPENING_CHARS + 1])
    return (text[: match.end()].strip(), text[match.end() :]) if match else (text, "")


def take_passage(units: list[str], at: int, rng: random.Random, first: str = "") -> tuple[str, int]:
    """`first` and whole units from `at` on, up to a random length: (passage, next index)."""
    target = rng.randint(60, 360)
    parts = [cut_at_sentence(first)] if first else []
    while not parts or sum(map(len, parts)) < target:
        unit = units[at % len(units)]
        if parts and sum(map(len, parts)) + len(unit) > MAX_ANSWER_CHARS:
            break
        parts.append(cut_at_sentence(unit))
        at += 1
    return "\n\n".join(parts), at % len(units)


def cut_at_sentence(text: str) -> str:
    """`text` if it fits an answer, else the sentences of it that do."""
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    ends = [m.end() for m in re.finditer(r"[.!?][\"']?(?=\s)", text[:MAX_ANSWER_CHARS])]
    return text[: ends[-1]] if ends else text[:MAX_ANSWER_CHARS]


def topic_prompt(answer: str, rng: random.Random) -> str:
    """A question with a word from the answer's start, so that answers take up the asked word."""
    words = [w for w in re.findall(r"\b[a-z]{4,}\b", answer[:200]) if w not in STOP_WORDS]
    if not words:
        return rng.choice(GENERIC_PROMPTS)
    return rng.choice(TOPIC_PROMPTS).format(rng.choice(words))


def find_functions(source: str) -> list[tuple[str, str]]:
    """(name, code) of functions short enough for an answer, also without their docstrings."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # cut in two by the split, or newer syntax than the running Python's
        return []
    lines = source.splitlines()
    found: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        variants = [lines[node.lineno - 1 : node.end_lineno]]
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            doc = node.body[0]
            before = lines[node.lineno - 1 : doc.lineno - 1]
            variants.append(before + lines[doc.end_lineno : node.end_lineno])
        for variant in variants:
            code = "\n".join(line[node.col_offset :] for line in variant)
            if len(code) <= MAX_ANSWER_CHARS and len(variant) > 1:
                found.append((node.name, code))
    return found


def code_turns(functions: list[tuple[str, str]], rng: random.Random) -> list[Turn]:
    """One or two exchanges; an answer is a whole function, so a bare `def name(` works too."""
    picked = rng.choices(functions, k=rng.choices((1, 2), (0.8, 0.2))[0])
    return [Turn(code_prompt(name, code, rng), code) for name, code in picked]


def code_prompt(name: str, code: str, rng: random.Random) -> str:
    """A question for the function: its signature, its name in words, or nothing in particular."""
    kind = rng.random()
    words = name.strip("_").replace("_", " ")
    if kind < 0.3:
        return f"def {name}("
    if kind < 0.5:
        return code.partition("\n")[0]
    if kind < 0.9 and words:
        return rng.choice(CODE_TOPIC_PROMPTS).format(words)
    return rng.choice(CODE_GENERIC_PROMPTS)
