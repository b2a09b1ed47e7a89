"""A test prompt on a model's page: one real request, as a key, billed to the key's tenant."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from admin.ask import Ask
from admin.forms import Field, Form
from gateway.errors import ApiError, ClientGone
from gateway.service import prompting
from gateway.types import RequestKind
from registry.catalog import ModelRecord
from registry.errors import NotFound

MAX_TOKENS = 64
MAX_PROMPT_LEN = 2000
ROUTE_KINDS: dict[str, RequestKind] = {
    "generate": "chat",
    "embed": "embedding",
    "classify": "classify",
}
DEFAULT_PROMPT = "Say hello."


@dataclass(frozen=True, slots=True)
class SmokeAnswer:
    """What came of it: `text`, or `trouble` with the error's code."""

    text: str = ""
    trouble: str = ""
    duration_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    request_id: str = ""


def form_for(ask: Ask, model: ModelRecord, given: bool = False) -> Form:
    """Prompt, and the key to ask as."""
    keys = prompting.asking_keys(ask.control) if _may(ask) else []
    fields = (
        Field("prompt", "Prompt", "textarea", value=DEFAULT_PROMPT, required=True,
              max_length=MAX_PROMPT_LEN),
        Field(
            "key",
            "As key",
            required=True,
            value=keys[0].public_id if keys else "",
            suggestions=[key.public_id for key in keys],
            help="Its limits hold, and its tenant pays.",
        ),
    )  # fmt: skip
    del model
    return Form(fields, ask.form if given else None)


def body_of(model: ModelRecord, prompt: str) -> dict[str, Any]:
    """The request that a caller of the API would send."""
    if model.task != "generate":
        return {"model": model.name, "input": prompt}
    message = {"role": "user", "content": prompt}
    return {"model": model.name, "messages": [message], "max_tokens": MAX_TOKENS}


def ask_model(ask: Ask, model: ModelRecord, form: Form) -> SmokeAnswer | None:
    """Send it and wait; None where the form is not sound."""
    prompt, key = form.text("prompt"), form.text("key")
    if not form.is_sound:
        return None
    try:
        found = prompting.key_to_ask_as(ask.control, key)
    except NotFound as error:
        form.errors["key"] = str(error)
        return None
    kind, body = ROUTE_KINDS[model.task], msgspec.json.encode(body_of(model, prompt))
    return whole_answer(ask, kind, body, found.key_id)


def whole_answer(ask: Ask, kind: RequestKind, body: bytes, key_id: str) -> SmokeAnswer:
    """Send a request as that key and wait."""
    began_s = time.monotonic()
    try:
        data = ask.request_as(kind, body, key_id)
    except ApiError as error:
        return SmokeAnswer(trouble=f"{error.message} ({error.kind.code})")
    except (TimeoutError, ClientGone):
        return SmokeAnswer(trouble="No answer within the time of a page; it may still come.")
    answer = msgspec.json.decode(data)
    usage = answer.get("usage") or {}
    return SmokeAnswer(
        text=_text(answer),
        duration_s=time.monotonic() - began_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        request_id=answer.get("id", ""),
    )


def _may(ask: Ask) -> bool:
    return any(role in ("owner", "admin") for role in ask.control.grants.values())


def _text(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"].get("content") or "")
    rows = answer.get("data") or [{}]
    if "embedding" in rows[0]:
        vector = rows[0]["embedding"]
        return f"{len(vector)} numbers: {', '.join(f'{x:.4f}' for x in vector[:8])}, ..."
    return msgspec.json.encode(rows[0]).decode()
