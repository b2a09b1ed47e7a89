"""What a running gateway process tells its operator of cached answers, and forgets at its word.

    {"ask": "stats"}
    {"ask": "show", "tenant_id": ID, "entry_id": REQUEST_ID}
    {"ask": "list", "tenant_id": ID, "model_name": NAME or "", "limit": N}
    {"ask": "purge", "tenant_id": ID or "", "model_name": ..., "key_id": ..., "question": TEXT}

One line of JSON each way over a socket in the data folder, as gateway/ipc/control_socket.py has it;
each gateway process of a server has its own. A purge that is answered is done: for this process,
and where the store is shared for every gateway. Who may is asked before, by
admin/operations/cache.py.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gateway.cache.types import AnswerStore, Entry, Selector, StoreUnavailable
from gateway.ipc import machine

MAX_NAME_CHARS = 16
MAX_LISTED = 1000
LISTED_CHARS = 120
"""Of a question and of an answer in a list."""
_PREFIX = "cache-"


class CacheQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that is sent."""

    ask: str
    tenant_id: str = ""
    model_name: str = ""
    key_id: str = ""
    question: str = ""
    entry_id: str = ""
    limit: int = 0


_questions = msgspec.json.Decoder(CacheQuestion)


def cache_socket_path(data_path: Path, name: str) -> Path:
    """Where the gateway process of that name listens."""
    return _folder(data_path) / f"{_PREFIX}{name}.sock"


def cache_socket_paths(data_path: Path) -> list[Path]:
    """Those that there are, of processes that have ended too."""
    return sorted(_folder(data_path).glob(f"{_PREFIX}*.sock"))


def _folder(data_path: Path) -> Path:
    """One for all of them, so that they are found: where the longest name would fit."""
    return machine.socket_path(data_path, f"{_PREFIX}{'x' * MAX_NAME_CHARS}").parent


class CacheHandler:
    """One object per gateway process. `on_purge` is called before anything is dropped and once more
    behind it, for look-ups go on meanwhile; `forget` drops what was learnt of a tenant, of a model,
    or of the one with the other."""

    def __init__(
        self,
        store: AnswerStore,
        on_purge: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
        forget: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._forget = forget
        self._on_purge = on_purge
        self._wall_clock = wall_clock

    async def answer(self, line: bytes) -> dict[str, Any]:
        """To one question; `error` where it is none, or cannot be answered."""
        try:
            question = _questions.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return {"error": f"invalid request: {error}"}
        try:
            return {"at": self._wall_clock()} | await self._answer(question)
        except StoreUnavailable as error:
            return {"error": f"the cache store did not answer, so the outcome is unknown: {error}"}

    async def _answer(self, question: CacheQuestion) -> dict[str, Any]:
        if question.ask == "stats":
            size = await self._store.size()
            return {
                "store": self._store.kind,
                "num_entries": size.num_entries,
                "num_bytes": size.num_bytes,
            }
        if question.ask == "show":
            found = await self._store.entries(question.tenant_id, question.entry_id)
            return {"entry": _shown(found[0]) if found and question.entry_id else None}
        if question.ask == "list":
            limit = min(max(question.limit, 0), MAX_LISTED)
            found = await self._store.entries(question.tenant_id, "", question.model_name, limit)
            return {"entries": [_listed(entry) for entry in found]}
        if question.ask == "purge":
            return await self._purge(question)
        return {"error": f"unknown request {question.ask!r}: ask stats, list, show or purge"}

    async def _purge(self, question: CacheQuestion) -> dict[str, Any]:
        """All of a tenant or of a model is a step, however much it is; else entries are sought."""
        tenant_id, model_name = question.tenant_id, question.model_name
        is_whole = not question.key_id and not question.question
        selector = Selector(tenant_id, model_name, question.key_id, question.question)
        if selector == Selector():
            return {"error": "select what to purge: a tenant, a model, a key or a text"}
        num_purged = None
        self._on_purge()
        try:
            if is_whole and bool(tenant_id) != bool(model_name):
                await self._store.invalidate(tenant_id, model_name)
            else:
                num_purged = await self._store.purge(selector)
        finally:
            self._on_purge()
        if is_whole and self._forget is not None:
            await self._forget(tenant_id, model_name)
        return {"purged": num_purged}


def _listed(entry: Entry) -> dict[str, Any]:
    shown = _shown(entry)
    texts = {name: shown[name][:LISTED_CHARS] for name in ("question", "answer")}
    named = ("request_id", "tenant_id", "key_id", "model", "made_at", "expires_at")
    return {name: shown[name] for name in named} | texts


def _shown(entry: Entry) -> dict[str, Any]:
    return {
        "request_id": entry.entry_id,
        "tenant_id": entry.scope.tenant_id,
        "key_id": entry.key_id,
        "model": entry.scope.model_name,
        "scope": entry.scope.digest.hex(),
        "question": entry.question,
        "answer": entry.answer.text,
        "finish_reason": entry.answer.finish_reason,
        "completion_tokens": entry.answer.completion_tokens,
        "cost_nanos": entry.cost_nanos,
        "made_at": entry.made_at,
        "expires_at": entry.expires_at,
        "confidence": msgspec.to_builtins(entry.confidence),
    }
