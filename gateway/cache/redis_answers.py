"""Kept answers in a Redis that several gateways share. See types.py for the seam.

    vectors   Redis 8 or later: one vector set a scope; Redis looks for the nearest
    matrix    an older one: answers and exact look-ups in Redis, the nearest are looked for in this
              process (vector_index.py), over vectors that lie with the entries

Which of them is found out at the first call and after each start of Redis, and logged. Whatever is
near is then fetched by the script, which serves nothing that has ended or been invalidated, so that
a member of a set without its entry costs a row of a result and is taken out.

Requests wait for look-ups only. What is to be kept or counted is sent in the background: at most
MAX_PENDING calls, beyond them they are dropped.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from cachetools import LRUCache

from gateway.cache.codec import (
    NO_SET,
    UNREADABLE,
    VALID_BYTES,
    decode,
    encode,
    encode_confidence,
    id_of,
    set_of,
)
from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.redis_link import BASE_BYTES, RedisLink, Reply
from gateway.cache.types import (
    SIMILARITY_FLOOR,
    Entry,
    Epoch,
    Found,
    Neighbour,
    Scope,
    Selector,
    Size,
    StoreUnavailable,
    Vector,
)
from gateway.cache.vector_index import RedisVectorMirror

logger = logging.getLogger(__name__)

MAX_PENDING = 1024
WRITERS = 4
WRITE_TIMEOUT_S = 1.0
ADMIN_TIMEOUT_S = 5.0
"""Of each of a purge's calls, which look through some hundred entries."""
EFFORT = 200
"""VSIM's EF: how many candidates it looks at. Of 100,000 vectors with 8 links each the nearest is
found in 96.5 % of cases with 50, 98.3 with 100, 99.4 with 200, 99.9 with 400, in 0.6, 0.8, 1.1 and
1.6 ms (docs/log.md)."""
SPARE = 4
"""Nearest ones asked for beyond k, for those that turn out to have ended."""
MAX_EPOCHS = 4096
ENTRY_OVERHEAD_BYTES = 480
MEMBER_OVERHEAD_BYTES = 700
"""What Redis takes beside an entry's bytes, and beside a vector's in its set (measured)."""

Matching: TypeAlias = Literal["vectors", "matrix"]
_Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class RedisAnswers:
    """See AnswerStore. `timeout_s` for each look-up, `write_timeout_s` for each call that no one
    waits for; `mirror_max_bytes` for vectors in this process where Redis has no vector sets."""

    def __init__(
        self,
        url: str,
        prefix: str,
        tenant_max_bytes: int,
        timeout_s: float = 0.02,
        mirror_max_bytes: int = 256 * 1024 * 1024,
        clock: Callable[[], float] = time.time,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        on_unreported: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = RedisLink(url, prefix, time.monotonic)
        self._tenant_max_bytes = tenant_max_bytes
        self._timeout_s, self._write_timeout_s = timeout_s, write_timeout_s
        self._clock = clock
        self._matching: Matching | None = None
        self._is_met = False
        self._base = b""
        self._epochs: LRUCache[tuple[str, str], Epoch] = LRUCache(MAX_EPOCHS)
        self._mirror = RedisVectorMirror(mirror_max_bytes)
        self._pending: deque[_Work] = deque()
        self._writing: set[asyncio.Task[None]] = set()
        self._on_unreported = on_unreported

    @property
    def link(self) -> RedisLink:
        """For what else belongs to these answers."""
        return self._link

    @property
    def kind(self) -> str:
        """See AnswerStore."""
        return f"redis ({self._matching or 'not connected yet'})"

    @property
    def is_out_of_reach(self) -> bool:
        """Redis does not answer."""
        return self._link.is_out_of_reach

    async def start(self) -> None:
        """See AnswerStore."""
        try:
            await self._link.within(self._write_timeout_s, self._meet)
        except StoreUnavailable as error:
            logger.warning("cache: cannot reach Redis (%s), no answers come from it", error)

    async def exact(self, scope: Scope, exact_key: bytes) -> Found:
        """See AnswerStore."""

        async def ask() -> Found:
            name = id_of(exact_key)
            epoch, (value,) = await self._ask("find", scope, name)
            entry = self._decoded(value, name, scope, epoch)
            return Found(entry if entry and entry.exact_key == exact_key else None, epoch)

        return await self._link.within(self._timeout_s, ask)

    async def nearest(self, scope: Scope, vector: Vector, k: int) -> list[Neighbour]:
        """See AnswerStore."""

        async def ask() -> list[Neighbour]:
            epoch = self._epochs.get(_names(scope))
            if epoch is None or not self._is_met:
                epoch, _ = await self._ask("epoch", scope)
                await self._meet()
            set_id = set_of(scope, epoch)
            near = await self._near(scope, epoch, set_id, vector, k + SPARE)
            near = [(one, cosine) for one, cosine in near if cosine >= SIMILARITY_FLOOR]
            if not near:
                return []
            ids = [one for one, _ in near]
            epoch, values = await self._ask("fetch", scope, set_id, *ids)
            entries = [
                self._decoded(value, one, scope, epoch)
                for one, value in zip(ids, values, strict=True)
            ]
            for one, entry in zip(ids, entries, strict=True):
                if entry is None:
                    self._mirror.remove(set_id, one)
            found = zip(entries, near, strict=True)
            return [Neighbour(entry, cosine) for entry, (_, cosine) in found if entry][:k]

        return await self._link.within(self._timeout_s, ask)

    async def entries(
        self, tenant_id: str, entry_id: str = "", model_name: str = "", limit: int = 1
    ) -> list[Entry]:
        """See AnswerStore."""
        found: dict[bytes, Entry] = {}
        cursor, tenant = b"0", quoted(tenant_id)
        while len(found) < limit:
            reply = await self._admin("search", tenant, "", cursor, entry_id, model_name)
            cursor, rows = reply[2]
            for name, value in zip(rows[::2], rows[1::2], strict=True):
                entry = self._read(value, name, tenant_id, reply[0])
                if entry is not None and entry.expires_at > self._clock():
                    found[name] = entry
            if cursor == b"0":
                break
        return list(found.values())[:limit]

    async def keep(self, entry: Entry) -> None:
        """See AnswerStore."""
        self._later(lambda: self._keep(entry))

    async def used(self, entry: Entry, saved_nanos: int) -> None:
        """See AnswerStore."""

        async def tell() -> None:
            await self._ask("use", entry.scope, id_of(entry.exact_key), saved_nanos)

        self._later(tell)

    async def learn(self, entry: Entry, confidence: Confidence) -> bool:
        """See AnswerStore."""
        was, now = encode_confidence(entry.confidence), encode_confidence(confidence)

        async def tell() -> bool:
            name = id_of(entry.exact_key)
            _, (done,) = await self._ask("learn", entry.scope, name, entry.entry_id, was, now)
            return bool(done)

        return await self._link.within(self._write_timeout_s, tell)

    async def purge(self, selector: Selector) -> int:
        """See AnswerStore."""
        if selector == Selector():
            raise ValueError("a purge has to say what of")
        tenant_id, model_name = selector.tenant_id, selector.model_name
        is_whole = selector in (Selector(tenant_id=tenant_id), Selector(model_name=model_name))
        await self._bump(*((tenant_id, model_name) if is_whole else ("", "")))
        return await self._drop(selector)

    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        """See AnswerStore."""
        for names in ((tenant_id, ""), ("", model_name)):
            if any(names):
                await self._bump(*names)

        self._begin(self._sweep(tenant_id))

    async def size(self) -> Size:
        """See AnswerStore."""
        num_entries, num_bytes = (await self._admin("size", b"", ""))[2]
        return Size(num_entries, num_bytes)

    async def drain(self) -> None:
        """Until everything that was to be sent has been."""
        while self._writing:
            await asyncio.wait(self._writing)

    async def close(self) -> None:
        """See AnswerStore; what is still to be sent is given a moment."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=self._write_timeout_s)
        for task in list(self._writing):
            task.cancel()
        self._mirror.close()
        await self._link.close()

    async def _near(
        self, scope: Scope, epoch: Epoch, set_id: bytes, vector: Vector, k: int
    ) -> list[tuple[bytes, float]]:
        if self._matching == "vectors":
            key = self._link.set_key(epoch, quoted(scope.tenant_id), set_id)
            return await self._link.similar(key, vector.tobytes(), k, EFFORT)

        async def since(after: bytes, limit: int) -> list[Any]:
            _, added = await self._ask("since", scope, set_id, after, limit)
            return list(added)

        await self._mirror.read(set_id, since, self._later)
        return await self._mirror.nearest(set_id, vector, k, SIMILARITY_FLOOR)

    async def _keep(self, entry: Entry) -> None:
        await self._meet()
        scope, vector, is_plain = entry.scope, entry.vector, self._matching != "vectors"
        overhead = ENTRY_OVERHEAD_BYTES
        if vector is not None:
            overhead += MEMBER_OVERHEAD_BYTES + (0 if is_plain else len(vector))
        value = encode(entry, is_plain, overhead)
        ttl_ms = int((entry.expires_at - self._clock()) * 1000)
        if ttl_ms <= 0:
            return
        name, limit = id_of(entry.exact_key), self._tenant_max_bytes
        asked = (entry.epoch, name, value, ttl_ms, entry.cost_nanos, limit)
        epoch, (is_kept,) = await self._ask("keep", scope, *asked)
        if is_kept and vector is not None and not is_plain:
            key = self._link.set_key(epoch, quoted(scope.tenant_id), set_of(scope, epoch))
            await self._link.add_member(key, name, vector.tobytes(), ttl_ms)

    async def _meet(self) -> None:
        """Find out what Redis can do, where that is not known. Until then it is what it was: a set
        of one kind is not to be taken for the other."""
        if not self._is_met:
            has_vectors = await self._link.has_vector_sets()
            self._is_met, self._matching = True, "vectors" if has_vectors else "matrix"
            if has_vectors:
                logger.info("cache: Redis has vector sets and does the similarity search")
            else:
                logger.info(
                    "cache: Redis has no vector sets (needs Redis 8), this process searches"
                )

    async def _ask(
        self, name: str, scope: Scope, *args: bytes | str | int
    ) -> tuple[Epoch, list[Any]]:
        tenant = quoted(scope.tenant_id)
        is_plain = self._matching == "matrix"
        reply = await self._link.call(name, tenant, scope.model_name, *args, is_plain=is_plain)
        self._noted(reply, tenant)
        self._epochs[_names(scope)] = reply[0]
        return reply[0], reply[2]

    async def _admin(
        self, name: str, tenant: bytes, model_name: str, *args: bytes | str | int
    ) -> Reply:
        async def ask() -> Reply:
            await self._meet()
            is_plain = self._matching == "matrix"
            return await self._link.call(name, tenant, model_name, *args, is_plain=is_plain)

        reply = await self._link.within(ADMIN_TIMEOUT_S, ask)
        self._noted(reply, tenant)
        return reply

    async def _bump(self, tenant_id: str, model_name: str) -> None:
        await self._admin("bump", quoted(tenant_id), model_name)

    async def _drop(self, selector: Selector, is_sweep: bool = False) -> int:
        """Take out what is old and, but for a sweep, what is selected."""
        tenants = [quoted(selector.tenant_id)]
        if not selector.tenant_id:
            tenants = (await self._admin("tenants", b"", ""))[2]
        wanted = (selector.model_name, selector.key_id, selector.question)
        num_dropped = 0
        for tenant in tenants:
            cursor = b"0"
            while True:
                args = (cursor, int(not is_sweep), *wanted)
                reply = await self._admin("drop", tenant, "", *args)
                cursor, num = reply[2]
                num_dropped += num
                if cursor == b"0":
                    break
        return num_dropped

    def _noted(self, reply: Reply, tenant: bytes) -> None:
        """What every answer tells beside what was asked."""
        epoch, gone, _ = reply
        base = epoch[:BASE_BYTES]
        if base != self._base:
            if self._base:
                logger.warning("cache: Redis has restarted, its cached answers are lost")
                self._is_met = False  # It may be another one.
                self._mirror.clear()
            self._base = base
        if gone and self._matching == "vectors":
            keyed = [
                (self._link.set_key(epoch, tenant, one[: len(NO_SET)]), one[len(NO_SET) :])
                for one in gone
            ]
            self._later(lambda: self._link.remove_members(keyed))

    def _decoded(
        self, value: bytes | None, name: bytes, scope: Scope, epoch: Epoch
    ) -> Entry | None:
        """An entry of this very scope, in its time by this clock too; none that another version of
        this program has written in its own way."""
        if not value or value[:VALID_BYTES] != epoch[:VALID_BYTES]:
            return None
        entry = self._read(value, name, scope.tenant_id, epoch)
        if entry is None or entry.scope != scope:
            return None
        return entry if entry.expires_at > self._clock() else None

    def _read(self, value: bytes, name: bytes, tenant_id: str, epoch: Epoch) -> Entry | None:
        try:
            return decode(value, name, tenant_id, epoch)
        except UNREADABLE as error:
            logger.info("cache: cannot read an entry: %s", error)
            return None

    async def _sweep(self, tenant_id: str) -> None:
        try:
            await self._drop(Selector(tenant_id=tenant_id), is_sweep=True)
        except StoreUnavailable as error:
            logger.info(
                "cache: cannot delete invalidated answers now, they go when they expire: %s", error
            )

    def _later(self, work: _Work) -> bool:
        if len(self._pending) >= MAX_PENDING:
            self._on_unreported()
            return False
        self._pending.append(work)
        if len(self._writing) < WRITERS:
            self._begin(self._write())
        return True

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="cache-writer")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self) -> None:
        while self._pending:
            work = self._pending.popleft()
            try:
                await self._link.within(self._write_timeout_s, work)
            except StoreUnavailable as error:
                self._on_unreported()
                logger.debug("cache: not sent: %s", error)


def quoted(tenant_id: str) -> bytes:
    """As it stands in names of keys: no colon, no brace."""
    return quote(tenant_id, safe="").encode()


def _names(scope: Scope) -> tuple[str, str]:
    return scope.tenant_id, scope.model_name
