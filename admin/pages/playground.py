"""Playground: talk with one model or two side by side, as any key: the way of any other request.

With scripts each side is a stream of its own (static/playground.js) and a talk has many turns;
without, the form is one prompt and its answers. What a talk costs is what its key's tenant is
billed: read from the ledger, not worked out here.
"""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from admin.context.policy.permissions import allowed
from admin.operations import keys, models, usage
from admin.operations.keys import AskingKey
from admin.operations.usage import Receipt
from admin.web.forms import Field, Form
from admin.web.request import PageRequest, PageRoute
from admin.web.streams import StreamedResponse
from gateway.errors import ApiError, ClientGone
from gateway.types import RequestKind
from registry.errors import NotFound
from registry.models.catalog import ModelRecord

MAX_PROMPT_LEN = 100_000
MAX_HISTORY = 200
MAX_TOKENS = 256
MAX_TEMPERATURE = 2.0
RECEIPT_WAIT_S = 1.0
RECEIPT_STEP_S = 0.1
MAX_TEST_TOKENS = 64
MAX_TEST_PROMPT_LEN = 2000
ROUTE_KINDS: dict[str, RequestKind] = {
    "generate": "chat",
    "embed": "embedding",
    "classify": "classify",
}
DEFAULT_PROMPT = "Say hello."


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something said earlier, as the page's script sends it back."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SmokeAnswer:
    """What came of it: `text`, or `trouble` with the error's code."""

    text: str = ""
    trouble: str = ""
    duration_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One model's answer on the page without scripts."""

    model: str
    answer: SmokeAnswer
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class PlaygroundQuestion:
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


def show_playground(request: PageRequest) -> Response:
    """The page, with the models that the address names."""
    return _page(request, _form(request, given=False))


def ask_once(request: PageRequest) -> Response:
    """Without scripts: one prompt, the answer of each model in turn."""
    form = _form(request, given=True)
    asked = _read(request, form)
    if asked is None:
        return _page(request, form, status=422)
    sides = []
    for model in asked.models:
        answer = whole_answer(request, "chat", asked.body(model, False), asked.key.key_id)
        sides.append(Side(model, answer, _wait_for_receipt(request, answer.request_id)))
    return _page(request, form, tuple(sides))


def stream_one(request: PageRequest) -> Response:
    """With scripts: the events of one model's answer; what is wrong with the form as text."""
    form = _form(request, given=True)
    asked = _read(request, form)
    if asked is None:
        problems = [form.trouble, *form.errors.values()]
        return PlainTextResponse(" ".join(filter(None, problems)), 422)
    body = asked.body(asked.models[0], True)
    events = request.events_as("chat", body, asked.key.key_id)
    return StreamedResponse(events, "text/event-stream")


def show_receipt(request: PageRequest) -> Response:
    """Tokens, times and cost of one answer as a piece of the page; empty while not posted."""
    found = usage.receipt(request.operator, request.path_params["request_id"])
    if found is None:
        return Response(status_code=204)
    currency = request.context.settings.currency
    return HTMLResponse(request.fragment("playground_parts.html", "figures", found, currency))


def _form(request: PageRequest, given: bool) -> Form:
    usable = keys.asking_keys(request.operator)
    names = models.chat_models(request.operator)
    first = next((name for name in names if _is_there(request, name)), names[0] if names else "")
    fields = (
        Field("model", "Model", required=True, value=request.query.get("model", first),
              suggestions=names),
        Field("beside", "Second model", value=request.query.get("beside", ""), suggestions=names,
              help="Receives the same prompt."),
        key_field(request, usable),
        Field("system", "System prompt", "textarea", max_length=MAX_PROMPT_LEN),
        Field("temperature", "Temperature", "number", help="0 to 2. Default: the model's own."),
        Field("max_tokens", "Max output tokens", "number", value=str(MAX_TOKENS),
              required=True),
        Field("prompt", "Prompt", "textarea", required=True, max_length=MAX_PROMPT_LEN),
    )  # fmt: skip
    return Form(fields, request.fields if given else None)


def key_field(request: PageRequest, usable: list[AskingKey]) -> Field:
    """The key to ask as: the one in the address, else one of an internal tenant, else none. No
    customer is billed without having been chosen; users of a single tenant, whose keys are all
    their own, find one of these filled in."""
    everybody = allowed(request.operator.grants, "keys.write")
    own = next((key.public_id for key in usable if key.internal or not everybody), "")
    return Field(
        "key",
        "Key",
        required=True,
        value=request.query.get("key", own)[:128],
        suggestions={key.public_id: key.title for key in usable},
        placeholder="Choose a key",
        help="Its limits apply and its tenant is billed.",
    )


def _is_there(request: PageRequest, model: str) -> bool:
    return (
        request.live_state is not None
        and "resident" in request.live_state.states_of(model).values()
    )


def _read(request: PageRequest, form: Form) -> PlaygroundQuestion | None:
    """None where something is wrong, which the form then says."""
    names = tuple(filter(None, (form.text("model"), form.text("beside"))))
    key, system, prompt = form.text("key"), form.text("system"), form.text("prompt")
    temperature, max_tokens = form.decimal("temperature"), form.whole("max_tokens", 1)
    if temperature is not None and temperature > MAX_TEMPERATURE:
        form.errors.setdefault("temperature", "At most 2.")
    history = _history(request, form)
    if not form.is_sound or max_tokens is None:
        return None
    try:
        found = keys.key_to_ask_as(request.operator, key)
    except NotFound as error:
        form.errors["key"] = str(error)
        return None
    first = [{"role": "system", "content": system}] if system else []
    said = [{"role": turn.role, "content": turn.content} for turn in history]
    messages = [*first, *said, {"role": "user", "content": prompt}]
    return PlaygroundQuestion(names, found, messages, max_tokens, temperature)


def _history(request: PageRequest, form: Form) -> list[Turn]:
    text = request.fields.get("history", "")
    try:
        turns = msgspec.json.decode(text, type=list[Turn]) if text else []
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeEncodeError):
        form.trouble = "The conversation could not be read. Start a new one."
        return []
    if len(turns) > MAX_HISTORY or any(t.role not in ("user", "assistant") for t in turns):
        form.trouble = f"A conversation has at most {MAX_HISTORY} turns. Start a new one."
    return turns


def _wait_for_receipt(request: PageRequest, request_id: str) -> Receipt | None:
    """The database has a posting a moment after its answer."""
    if not request_id:
        return None
    ends_s = time.monotonic() + RECEIPT_WAIT_S
    while (found := usage.receipt(request.operator, request_id)) is None:
        if time.monotonic() > ends_s:
            return None
        time.sleep(RECEIPT_STEP_S)
    return found


def _page(
    request: PageRequest, form: Form, sides: tuple[Side, ...] = (), status: int = 200
) -> Response:
    has_key = bool(form.fields[2].suggestions)
    return request.page("playground.html", status, form=form, sides=sides, has_key=has_key)


def form_for(request: PageRequest, model: ModelRecord, given: bool = False) -> Form:
    """Prompt, and the key to ask as."""
    usable = keys.asking_keys(request.operator) if _may(request) else []
    fields = (
        Field("prompt", "Prompt", "textarea", value=DEFAULT_PROMPT, required=True,
              max_length=MAX_TEST_PROMPT_LEN),
        key_field(request, usable),
    )  # fmt: skip
    del model
    return Form(fields, request.fields if given else None)


def body_of(model: ModelRecord, prompt: str) -> dict[str, Any]:
    """The request that a caller of the API would send."""
    if model.task != "generate":
        return {"model": model.name, "input": prompt}
    message = {"role": "user", "content": prompt}
    return {"model": model.name, "messages": [message], "max_tokens": MAX_TEST_TOKENS}


def ask_model(request: PageRequest, model: ModelRecord, form: Form) -> SmokeAnswer | None:
    """Send it and wait; None where the form is not sound."""
    prompt, key = form.text("prompt"), form.text("key")
    if not form.is_sound:
        return None
    try:
        found = keys.key_to_ask_as(request.operator, key)
    except NotFound as error:
        form.errors["key"] = str(error)
        return None
    kind, body = ROUTE_KINDS[model.task], msgspec.json.encode(body_of(model, prompt))
    return whole_answer(request, kind, body, found.key_id)


def whole_answer(request: PageRequest, kind: RequestKind, body: bytes, key_id: str) -> SmokeAnswer:
    """Send a request as that key and wait."""
    began_s = time.monotonic()
    try:
        data = request.request_as(kind, body, key_id)
    except ApiError as error:
        return SmokeAnswer(trouble=f"{error.message} ({error.kind.code})")
    except (TimeoutError, ClientGone):
        return SmokeAnswer(
            trouble="The model did not answer in time. The request may still finish."
        )
    answer = msgspec.json.decode(data)
    usage = answer.get("usage") or {}
    return SmokeAnswer(
        text=_text(answer),
        duration_s=time.monotonic() - began_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        request_id=answer.get("id", ""),
    )


def _may(request: PageRequest) -> bool:
    return any(role in ("owner", "admin") for role in request.operator.grants.values())


def _text(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"].get("content") or "")
    rows = answer.get("data") or [{}]
    if "embedding" in rows[0]:
        vector = rows[0]["embedding"]
        return f"{len(vector)} numbers: {', '.join(f'{x:.4f}' for x in vector[:8])}, ..."
    return msgspec.json.encode(rows[0]).decode()


ROUTES = (
    PageRoute("GET", "/playground", show_playground),
    PageRoute("POST", "/playground", ask_once, pool="checks"),
    PageRoute("POST", "/playground/stream", stream_one),
    PageRoute("GET", "/playground/receipt/{request_id}", show_receipt),
)
