"""Playground: talk with one model or two side by side, as any key: the way of any other request.

With scripts each side is a stream of its own (static/playground.js) and a talk has many turns;
without, the form is one prompt and its answers. What a talk costs is what its key's tenant is
billed: read from the ledger, not worked out here.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from admin.ask import Ask, PageRoute, Reply
from admin.forms import Field, Form
from admin.pages import smoke
from gateway.service import playground as verbs
from gateway.service import prompting
from gateway.service.playground import Receipt
from gateway.service.prompting import AskingKey
from registry.errors import NotFound

MAX_PROMPT_LEN = 100_000
MAX_HISTORY = 200
MAX_TOKENS = 256
MAX_TEMPERATURE = 2.0
RECEIPT_WAIT_S = 1.0
RECEIPT_STEP_S = 0.1


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something said earlier, as the page's script sends it back."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Side:
    """One model's answer on the page without scripts."""

    model: str
    answer: smoke.SmokeAnswer
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A sound form."""

    models: tuple[str, ...]
    key: AskingKey
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float | None

    def body(self, model: str, stream: bool) -> bytes:
        """The request that a caller of the API would send."""
        found: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
        }
        if self.temperature is not None:
            found["temperature"] = self.temperature
        if stream:
            found |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(found)


def show_playground(ask: Ask) -> Reply:
    """The page, with the models that the address names."""
    return _page(ask, _form(ask, given=False))


def ask_once(ask: Ask) -> Reply:
    """Without scripts: one prompt, the answer of each model in turn."""
    form = _form(ask, given=True)
    asked = _read(ask, form)
    if asked is None:
        return _page(ask, form, status=422)
    sides = []
    for model in asked.models:
        answer = smoke.whole_answer(ask, "chat", asked.body(model, False), asked.key.key_id)
        sides.append(Side(model, answer, _wait_for_receipt(ask, answer.request_id)))
    return _page(ask, form, tuple(sides))


def stream_one(ask: Ask) -> Reply:
    """With scripts: the events of one model's answer; what is wrong with the form as text."""
    form = _form(ask, given=True)
    asked = _read(ask, form)
    if asked is None:
        told = [form.trouble, *form.errors.values()]
        return Reply(" ".join(filter(None, told)).encode(), 422, "text/plain; charset=utf-8")
    body = asked.body(asked.models[0], True)
    events = ask.events_as("chat", body, asked.key.key_id)
    return Reply(media="text/event-stream", chunks=events)


def show_receipt(ask: Ask) -> Reply:
    """Tokens, times and cost of one answer as a piece of the page; empty while not posted."""
    found = verbs.receipt(ask.control, ask.params["request_id"])
    if found is None:
        return Reply(b"", 204)
    currency = ask.desk.settings.currency
    return Reply(ask.fragment("playground_parts.html", "figures", found, currency).encode())


def _form(ask: Ask, given: bool) -> Form:
    keys = prompting.asking_keys(ask.control)
    names = verbs.chat_models(ask.control)
    first = next((name for name in names if _is_there(ask, name)), names[0] if names else "")
    fields = (
        Field("model", "Model", required=True, value=ask.query.get("model", first),
              suggestions=names),
        Field("beside", "Beside it", value=ask.query.get("beside", ""), suggestions=names,
              help="A second model, asked the same."),
        Field("key", "As key", required=True, value=keys[0].public_id if keys else "",
              suggestions=[key.public_id for key in keys],
              help="Its limits hold, and its tenant pays."),
        Field("system", "System prompt", "textarea", max_length=MAX_PROMPT_LEN),
        Field("temperature", "Temperature", "number", help="0 to 2; empty: the model's own."),
        Field("max_tokens", "Most tokens of an answer", "number", value=str(MAX_TOKENS),
              required=True),
        Field("prompt", "Prompt", "textarea", required=True, max_length=MAX_PROMPT_LEN),
    )  # fmt: skip
    return Form(fields, ask.form if given else None)


def _is_there(ask: Ask, model: str) -> bool:
    return ask.state is not None and "resident" in ask.state.states_of(model).values()


def _read(ask: Ask, form: Form) -> Asked | None:
    """None where something is wrong, which the form then says."""
    names = tuple(filter(None, (form.text("model"), form.text("beside"))))
    key, system, prompt = form.text("key"), form.text("system"), form.text("prompt")
    temperature, max_tokens = form.decimal("temperature"), form.whole("max_tokens", 1)
    if temperature is not None and temperature > MAX_TEMPERATURE:
        form.errors.setdefault("temperature", "At most 2.")
    history = _history(ask, form)
    if not form.is_sound or max_tokens is None:
        return None
    try:
        found = prompting.key_to_ask_as(ask.control, key)
    except NotFound as error:
        form.errors["key"] = str(error)
        return None
    first = [{"role": "system", "content": system}] if system else []
    said = [{"role": turn.role, "content": turn.content} for turn in history]
    messages = [*first, *said, {"role": "user", "content": prompt}]
    return Asked(names, found, messages, max_tokens, temperature)


def _history(ask: Ask, form: Form) -> list[Turn]:
    text = ask.form.get("history", "")
    try:
        turns = msgspec.json.decode(text, type=list[Turn]) if text else []
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeEncodeError):
        form.trouble = "What was said before cannot be read: begin anew."
        return []
    if len(turns) > MAX_HISTORY or any(t.role not in ("user", "assistant") for t in turns):
        form.trouble = f"A talk has at most {MAX_HISTORY} turns: begin anew."
    return turns


def _wait_for_receipt(ask: Ask, request_id: str) -> Receipt | None:
    """The database has a posting a moment after its answer."""
    if not request_id:
        return None
    ends_s = time.monotonic() + RECEIPT_WAIT_S
    while (found := verbs.receipt(ask.control, request_id)) is None:
        if time.monotonic() > ends_s:
            return None
        time.sleep(RECEIPT_STEP_S)
    return found


def _page(ask: Ask, form: Form, sides: tuple[Side, ...] = (), status: int = 200) -> Reply:
    has_key = bool(form.fields[2].suggestions)
    return ask.page("playground.html", status, form=form, sides=sides, has_key=has_key)


ROUTES = (
    PageRoute("GET", "/playground", show_playground, live=True),
    PageRoute("POST", "/playground", ask_once, live=True, pool="checks"),
    PageRoute("POST", "/playground/stream", stream_one),
    PageRoute("GET", "/playground/receipt/{request_id}", show_receipt),
)
