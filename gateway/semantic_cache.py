"""Stage 4: answers given before. This build matches exactly; meaning comes later, behind this seam.

Off unless a key or a request turns it on; which requests are eligible is policy/cache_rule.py's.
The scope of an entry is everything its text depends on: tenant, model revision, endpoint, prompt
tokens, sampling, length and stops. So no tenant ever sees what another asked. Bounded in bytes,
least recently used first out; an entry lives for its TTL from when it was made, however often it
is hit, so that a bad one does not live for ever.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from cachetools import TTLCache

from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.types import CacheMode, PreparedRequest

MODE_HEADER = "x-polyhost-cache-mode"
RESULT_HEADER = "x-polyhost-cache"

# What changes nothing where the likeliest token is taken.
_UNUSED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
# What an entry takes besides its text: key, dataclass, the cache's own links.
_ENTRY_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A complete answer. `finish_reason` is stop or length."""

    text: str
    finish_reason: str
    completion_tokens: int


class SemanticCache:
    """Answers by exact request. Used on the event loop only."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._answers: TTLCache[bytes, CachedAnswer] = TTLCache(
            max_bytes, ttl_s, timer=clock, getsizeof=_size_bytes
        )

    def find(self, key: bytes) -> CachedAnswer | None:
        """The answer to this very request (`key_of`), if it is kept."""
        return self._answers.get(key)

    def keep(self, key: bytes, answer: CachedAnswer) -> None:
        """Remember an answer; one that is larger than the whole cache is not kept."""
        if _size_bytes(answer) <= self._answers.maxsize:
            self._answers[key] = answer

    @property
    def size_bytes(self) -> int:
        """What the entries take, as they are counted."""
        return int(self._answers.currsize)


def requested_mode(headers: Mapping[str, str]) -> CacheMode | None:
    """What the request's header asks for. Raises ApiError for a mode that is not served."""
    value = headers.get(MODE_HEADER)
    if value is None:
        return None
    if value == "off":
        return "off"
    if value == "exact":
        return "exact"
    raise ApiError(
        UNSUPPORTED_PARAMETER, f"{MODE_HEADER} must be off or exact, not {value!r}", MODE_HEADER
    )


def key_of(tenant_id: str, request: PreparedRequest) -> bytes:
    """What the answer depends on, as one name."""
    sampling = request.sampling
    greedy = sampling.temperature == 0
    scope = (
        tenant_id,
        request.model.name,
        request.model.revision,
        request.kind,
        request.prompt_token_ids,
        request.max_tokens,
        msgspec.structs.replace(sampling, **({"seed": 0, **_UNUSED} if greedy else {})),
        request.constraint,
        sorted(request.shown_token_ids),
        request.stop_token_ids,
        request.stop_strings,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(scope), digest_size=32).digest()


def _size_bytes(answer: CachedAnswer) -> int:
    # UTF-8 length is what a copy of the text takes in most scripts, within a factor of two.
    return len(answer.text.encode()) + _ENTRY_OVERHEAD_BYTES
