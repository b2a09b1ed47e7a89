"""The verbs on cached answers, for the CLI and the operator's pages (control.py).

Answers live in the memory of gateway processes, or in the Redis that they share; either way they
are asked over their sockets (gateway/cache/desk.py), all of this server's. Where none runs, a Redis
is asked from here. A purge is in the audit log, without the text that it names.
"""

import asyncio
import hashlib
import json
import socket
import time
from pathlib import Path
from typing import Any

from gateway.cache import stores
from gateway.cache.calibration_files import calibration_folder, forget_files
from gateway.cache.desk import CacheDesk, desk_sockets
from gateway.cache.types import Selector
from gateway.service.control import Control, find_key, find_tenant, require
from registry import audit, tenants
from registry.errors import InvalidValue, NotFound, RegistryError

TIMEOUT_S = 10.0
MAX_TEXT_CHARS = 10_000


def cache_stats(control: Control) -> list[dict[str, Any]]:
    """What is kept, a row for each gateway process; a store that they share is told by each."""
    require(control, "cache.read")
    return _ask_all(control, {"ask": "stats"})


def purge_cache(
    control: Control, tenant: str = "", model: str = "", key: str = "", text: str = ""
) -> int | None:
    """Forget all of which everything holds that is given; how many entries, None: all of a tenant
    or of a model, which nobody counts. Done for every gateway when it returns.

    `text`: what the user said last, to the letter. Raises InvalidValue, Forbidden, RegistryError.
    """
    if not (tenant or model or key or text):
        raise InvalidValue("say what to purge: --tenant, --model, --key or --text")
    try:
        f"{tenant}{model}{key}{text}".encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("that is not valid UTF-8: no name or question has such bytes") from error
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidValue(f"a text of more than {MAX_TEXT_CHARS} characters: purge by its key")
    tenant_id = key_id = ""
    with control.writing() as session:
        if tenant:
            tenant_id = find_tenant(control, session, tenant, "cache.write").id
        if key:
            found = find_key(control, session, key, "cache.write")
            key_id, tenant_id = found.id, tenant_id or found.tenant_id
        require(control, "cache.write", tenant_id)
        said = hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
        named = {"tenant_id": tenant_id, "model": model, "key_id": key_id, "text_sha256": said}
        told: dict[str, Any] = {name: value for name, value in named.items() if value}
        target = key_id or tenant_id or model or "text"
        audit.record(session, control.clock(), "cache.purge", target, None, told)
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
            forget_files(calibration_folder(control.settings.data_path), tenant_id, model)
        except OSError as error:
            raise RegistryError(f"what was learnt cannot be forgotten: {error}") from error
    counts = [row["purged"] for row in _ask_all(control, question)]
    return None if None in counts else sum(counts)


def list_entries(
    control: Control, tenant: str, model: str = "", limit: int = 100
) -> list[dict[str, Any]]:
    """Kept answers of a tenant, or of its with a model, some of them if there are more; the newest
    first, texts cut. Who may purge them may read them."""
    with control.reading() as session:
        tenant_id = find_tenant(control, session, tenant, "cache.write").id
    if limit < 1:
        raise InvalidValue("say how many to list: 1 or more")
    question = {"ask": "list", "tenant_id": tenant_id, "model_name": model, "limit": limit}
    found: dict[str, dict[str, Any]] = {}
    for row in _ask_all(control, question):
        found |= {entry["request_id"]: entry for entry in row["entries"]}
    return sorted(found.values(), key=lambda entry: -entry["made_at"])[:limit]


def show_entry(control: Control, request_id: str, tenant: str = "") -> dict[str, Any]:
    """The kept answer that came from a request. Its texts are the tenant's: who may purge them may
    read them. `tenant` saves looking through those of all. Raises NotFound."""
    with control.reading() as session:
        if tenant:
            names = [find_tenant(control, session, tenant, "cache.write").id]
        else:
            require(control, "cache.write")
            names = [found.id for found in tenants.list_tenants(session)]
    for tenant_id in names:
        question = {"ask": "show", "tenant_id": tenant_id, "entry_id": request_id}
        for row in _ask_all(control, question):
            if row["entry"] is not None:
                entry: dict[str, Any] = row["entry"]
                return entry
    raise NotFound(
        f"no answer is kept of request {request_id!r}: it was never kept, has expired or was purged"
    )


def _ask_all(control: Control, question: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises RegistryError where nobody can be asked, or one that was asked cannot say."""
    line = json.dumps(question, ensure_ascii=False).encode() + b"\n"
    answers = []
    for path in desk_sockets(control.settings.data_path):
        answer = _ask(path, line)
        if answer is not None:
            answers.append({"gateway": path.stem.partition("-")[2]} | answer)
    if not answers and control.settings.redis_url:
        answers.append({"gateway": "none runs"} | asyncio.run(_ask_redis(control, line)))
    if not answers:
        raise RegistryError(
            f"no server is running on {control.settings.data_path}, and without a Redis no answer "
            "is kept beyond its end"
        )
    for answer in answers:
        if "error" in answer:
            raise RegistryError(f"{answer['gateway']}: {answer['error']}")
    return answers


def _ask(path: Path, line: bytes) -> dict[str, Any] | None:
    """None where nobody listens. One that listens and does not answer must not pass for done."""
    parts = []
    ends_s = time.monotonic() + TIMEOUT_S
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(TIMEOUT_S)
            link.connect(str(path))
            link.sendall(line)
            while (part := link.recv(1 << 16)) and time.monotonic() < ends_s:
                parts.append(part)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (TimeoutError, ConnectionError) as error:
        return {"error": f"it did not answer ({error}): try again"}
    if not parts:
        return {"error": "it sent no answer: too many ask at once, or it is stopping; try again"}
    try:
        answer: dict[str, Any] = json.loads(b"".join(parts))
    except ValueError:
        return {"error": "its answer broke off: try again"}
    return answer


async def _ask_redis(control: Control, line: bytes) -> dict[str, Any]:
    store = stores.open_store(control.settings, control.clock)
    try:
        await stores.begin(store)
        learnt = stores.calibrations_beside(store, control.settings)
        desk = CacheDesk(store, wall_clock=control.clock, forget=learnt.forget)
        return await desk.answer(line)
    finally:
        await store.close()
