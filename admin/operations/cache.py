"""Operations on cached answers.

Answers live in the memory of gateway processes, or in the Redis that they share; either way they
are asked over their sockets (gateway/cache/cache_handler.py), all of this server's. Where none
runs, a Redis is asked from here. A purge is in the audit log, without the text that it names.
"""

import asyncio
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_key, find_tenant, require
from gateway.cache.cache_handler import CacheHandler, cache_socket_path, cache_socket_paths
from gateway.cache.calibrations import calibration_folder, forget_files
from gateway.cache.lookup import open_stores
from gateway.cache.types import Selector
from gateway.ipc.control_socket import exchange, line_of, nobody_listens
from registry import audit
from registry.accounts import tenants
from registry.errors import InvalidValue, NotFound, RegistryError
from registry.money import recent
from registry.money.recent import CacheUse

TIMEOUT_S = 10.0
MAX_TEXT_CHARS = 10_000
RECENT_S = 86_400.0
Z = 1.96
"""Of a normal distribution: 95 in a hundred lie within it."""


@operation("cache.read")
def cache_stats(context: OperatorContext) -> list[dict[str, Any]]:
    """What is kept, a row for each gateway process; a store that they share is reported by each."""
    return _ask_all(context, {"ask": "stats"})


@operation("cache.write", on="tenant", audit=("cache.purge",))
def purge_cache(
    context: OperatorContext, tenant: str = "", model: str = "", key: str = "", text: str = ""
) -> int | None:
    """Forget all of which everything holds that is given; how many entries, None: all of a tenant
    or of a model, which nobody counts. Done for every gateway when it returns.

    `text`: what the user said last, to the letter. Raises InvalidValue, Forbidden, RegistryError.
    """
    if not (tenant or model or key or text):
        raise InvalidValue("name what to purge: --tenant, --model, --key or --text")
    try:
        f"{tenant}{model}{key}{text}".encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("the name or text is not valid UTF-8") from error
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidValue(
            f"the text is longer than {MAX_TEXT_CHARS} characters; purge by key instead"
        )
    tenant_id = key_id = ""
    with context.writing() as session:
        if tenant:
            tenant_id = find_tenant(context, session, tenant, "cache.write").id
        if key:
            found = find_key(context, session, key, "cache.write")
            key_id, tenant_id = found.id, tenant_id or found.tenant_id
        require(context, "cache.write", tenant_id)
        said = hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
        named = {"tenant_id": tenant_id, "model": model, "key_id": key_id, "text_sha256": said}
        shown: dict[str, Any] = {name: value for name, value in named.items() if value}
        target = key_id or tenant_id or model or "text"
        audit.record(session, context.clock(), "cache.purge", target, None, shown)
    selector = Selector(tenant_id, model, key_id, text)
    question = {
        "ask": "purge",
        "tenant_id": selector.tenant_id,
        "model_name": selector.model_name,
        "key_id": selector.key_id,
        "question": selector.question,
    }
    if not (key or text):  # Where no server runs, too: what was learnt outlives it.
        try:
            forget_files(calibration_folder(context.settings.data_path), tenant_id, model)
        except OSError as error:
            raise RegistryError(f"the calibration could not be deleted: {error}") from error
    counts = [row["purged"] for row in _ask_all(context, question)]
    return None if None in counts else sum(counts)


@operation("cache.write", on="tenant", audit=("cache.read",))
def list_entries(
    context: OperatorContext, tenant: str, model: str = "", limit: int = 100
) -> list[dict[str, Any]]:
    """Kept answers of a tenant, or of its with a model, some of them if there are more; the newest
    first, texts cut. Who may purge them may read them; that they did is in the audit log."""
    if limit < 1:
        raise InvalidValue("the limit must be 1 or more")
    with context.writing() as session:
        tenant_id = find_tenant(context, session, tenant, "cache.write").id
        _record_reading(context, session, tenant_id, {"model": model} if model else {})
    question = {"ask": "list", "tenant_id": tenant_id, "model_name": model, "limit": limit}
    found: dict[str, dict[str, Any]] = {}
    for row in _ask_all(context, question):
        found |= {entry["request_id"]: entry for entry in row["entries"]}
    return sorted(found.values(), key=lambda entry: -entry["made_at"])[:limit]


@operation("cache.write", on="tenant", audit=("cache.read",))
def show_entry(context: OperatorContext, request_id: str, tenant: str = "") -> dict[str, Any]:
    """The kept answer that came from a request. Its texts are the tenant's: who may purge them may
    read them; that they did is in the audit log. `tenant` saves looking through those of all.
    Raises NotFound."""
    with context.writing() as session:
        if tenant:
            names = [find_tenant(context, session, tenant, "cache.write").id]
        else:
            require(context, "cache.write")
            names = [found.id for found in tenants.list_tenants(session)]
        target = names[0] if tenant else request_id
        _record_reading(context, session, target, {"request_id": request_id})
    for tenant_id in names:
        question = {"ask": "show", "tenant_id": tenant_id, "entry_id": request_id}
        for row in _ask_all(context, question):
            if row["entry"] is not None:
                entry: dict[str, Any] = row["entry"]
                return entry
    raise NotFound(
        f"no cached answer of request {request_id!r}: it was not stored, has expired or was purged"
    )


def _record_reading(
    context: OperatorContext, session: Session, target: str, what: dict[str, Any]
) -> None:
    """Before anything is shown; which answers, and nothing of what they say."""
    audit.record(session, context.clock(), "cache.read", target, None, what)


def _ask_all(context: OperatorContext, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises RegistryError where nobody can be asked, or one that was asked cannot say."""
    line = line_of(question)
    answers = []
    for path in cache_socket_paths(context.settings.data_path):
        answer = _ask(path, line)
        if answer is not None:
            answers.append({"gateway": path.stem.partition("-")[2]} | answer)
    if not answers and context.settings.redis_url:
        answers.append({"gateway": "none running"} | asyncio.run(_ask_redis(context, line)))
    if not answers:
        data_path = context.settings.data_path
        raise nobody_listens(data_path, cache_socket_path(data_path, "gateway-0"))
    for answer in answers:
        if "error" in answer:
            raise RegistryError(f"{answer['gateway']}: {answer['error']}")
    return answers


def _ask(path: Path, line: bytes) -> dict[str, Any] | None:
    """None where nobody listens. One that listens and does not answer must not pass for done."""
    try:
        text = exchange(path, line, TIMEOUT_S)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (TimeoutError, ConnectionError) as error:
        return {"error": f"the gateway did not answer ({error}); try again"}
    if not text:
        return {"error": "the gateway sent no answer: it is busy or stopping; try again"}
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"error": "the answer of the gateway was incomplete; try again"}
    return answer


async def _ask_redis(context: OperatorContext, line: bytes) -> dict[str, Any]:
    store, learnt = open_stores(context.settings, context.clock)
    try:
        await store.start()
        handler = CacheHandler(store, wall_clock=context.clock, forget=learnt.forget)
        return await handler.answer(line)
    finally:
        await store.close()


@operation("cache.read", "usage.read")
def cache_uses(context: OperatorContext) -> list[CacheUse]:
    """By tenant and model, of the last day. Raises Forbidden."""
    with context.reading() as session:
        return recent.cache_use(session, context.clock() - RECENT_S)


def upper_bound(num_bad: int, num_all: int) -> float:
    """What a share is at most, with 95 % confidence (Wilson's score interval); 1.0 of nothing."""
    if not num_all:
        return 1.0
    share = num_bad / num_all
    middle = share + Z**2 / (2 * num_all)
    spread = Z * math.sqrt(share * (1 - share) / num_all + Z**2 / (4 * num_all**2))
    return min(1.0, (middle + spread) / (1 + Z**2 / num_all))
