"""What a tenant may ask of its own usage and costs, in the words of OpenAI's organization API.

Comes in: the parameters of a query (strings) and whose key asks. Goes out: a page of buckets, as
JSON. The database is read and the page is made in one thread: a large page would hold up the event
loop. A few may wait for it, of one tenant fewer, and the next is told
so. Routes are gets.py's, sums registry/money/usage_buckets.py's.

Buckets begin at whole minutes, hours or days of UTC: the first one is that in which `start_time`
lies. A page's cursor is the beginning of its first bucket.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.errors import INVALID_REQUEST, QUEUE_FULL, UNAVAILABLE, UNSUPPORTED_PARAMETER, ApiError
from gateway.settings.settings import Settings
from gateway.types import Principal
from registry.errors import RegistryError
from registry.money.usage_buckets import BucketQuery, BucketSum, bucket_sums
from registry.session import make_engine, reading

MAX_WAITING = 16
MAX_WAITING_TENANT = 4
MAX_NAMES = 100
MAX_EPOCH_S = 253_402_300_800
"""The year 10000."""
WIDTHS = {"1m": (60, 60, 1440), "1h": (3600, 24, 168), "1d": (86_400, 7, 31)}
"""Seconds, buckets a page, and at most."""
COST_WIDTHS = {"1d": (86_400, 7, 180)}
COMPLETIONS = ("chat", "completion")
GROUPS = {"project_id": "", "api_key_id": "key_id", "model": "model"}
COST_GROUPS = {"project_id": "", "api_key_id": "key_id", "line_item": "model"}
METERS = {
    "cached input": "cached_nanos",
    "output": "output_nanos",
    "compute": "service_nanos",
    "load": "load_nanos",
}
"""What is left of the cost is of uncached input."""
NANOS = 1_000_000_000

Params: TypeAlias = Mapping[str, Sequence[str]]
Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query's parameters, checked. `groups`: as the caller named them."""

    start: int
    end: int
    width_s: int
    limit: int
    groups: tuple[str, ...]
    by: tuple[str, ...]
    key_ids: tuple[str, ...]
    models: tuple[str, ...]
    is_other: bool
    """It is of projects that are not the caller's: there is nothing to be seen."""


_Layout: TypeAlias = Callable[[str, _Asked, BucketSum], list[Json]]


class UsageReports:
    """Of one gateway process. Connects to the database when it is first asked."""

    def __init__(self, settings: Settings, wall_clock: Callable[[], float]) -> None:
        self._engine = make_engine(settings.registry_url)
        self._wall_clock = wall_clock
        self._currency = settings.currency.lower()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._asked_by: Counter[str] = Counter()

    async def completions(self, principal: Principal, params: Params) -> bytes:
        """Tokens and requests of chats and completions. Raises ApiError."""
        asked = self._asked(principal, params, WIDTHS, GROUPS, {"models"})
        return await self._page(principal, asked, COMPLETIONS, self._usage)

    async def costs(self, principal: Principal, params: Params) -> bytes:
        """Money, of everything. Raises ApiError."""
        asked = self._asked(principal, params, COST_WIDTHS, COST_GROUPS, set())
        return await self._page(principal, asked, (), self._costs)

    def close(self) -> None:
        """When no more requests come. Blocks until what runs has ended."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._engine.dispose()

    def _asked(
        self,
        principal: Principal,
        params: Params,
        widths: Mapping[str, tuple[int, int, int]],
        groups: Mapping[str, str],
        more: set[str],
    ) -> _Asked:
        found = {name.removesuffix("[]"): values for name, values in params.items()}
        known = {"start_time", "end_time", "bucket_width", "group_by", "limit", "page"}
        for name in found.keys() - known - {"project_ids", "api_key_ids"} - more:
            raise ApiError(UNSUPPORTED_PARAMETER, f"{name} is not supported: remove it", name)
        width = _one(found, "bucket_width", "1d")
        if width not in widths:
            raise _invalid("bucket_width", f"must be one of {', '.join(widths)}")
        width_s, usual, most = widths[width]
        start = _number(found, "start_time", None, MAX_EPOCH_S)
        now = int(self._wall_clock()) + 1
        end = min(_number(found, "end_time", now, MAX_EPOCH_S), now)
        limit = _number(found, "limit", usual, most)
        if not limit:
            raise _invalid("limit", "must be at least 1")
        named = tuple(dict.fromkeys(_many(found, "group_by")))
        for name in named:
            if name not in groups:
                raise ApiError(
                    UNSUPPORTED_PARAMETER, f"group_by {name} is not supported", "group_by"
                )
        first = _number(found, "page", start, MAX_EPOCH_S)
        projects = _many(found, "project_ids")
        return _Asked(
            start=max(start, first) // width_s * width_s,
            end=-(-end // width_s) * width_s,
            width_s=width_s,
            limit=limit,
            groups=named,
            by=tuple(groups[name] for name in named if groups[name]),
            key_ids=_many(found, "api_key_ids"),
            models=_many(found, "models"),
            is_other=bool(projects) and principal.tenant_id not in projects,
        )

    async def _page(
        self,
        principal: Principal,
        asked: _Asked,
        kinds: tuple[str, ...],
        layout: _Layout,
    ) -> bytes:
        ends = min(asked.end, asked.start + asked.limit * asked.width_s)
        query = BucketQuery(
            principal.tenant_id,
            asked.start,
            ends,
            asked.width_s,
            asked.key_ids,
            asked.models,
            kinds,
            asked.by,
        )
        if asked.start >= ends or asked.is_other:
            return _page_of(query, asked, layout, [])
        return await self._made(query.tenant_id, lambda: self._read(query, asked, layout))

    def _read(self, query: BucketQuery, asked: _Asked, layout: _Layout) -> bytes:
        """In the thread. The query names the caller's own tenant and no other."""
        with reading(self._engine) as session:
            sums = bucket_sums(session, query)
        return _page_of(query, asked, layout, sums)

    async def _made(self, tenant_id: str, make: Callable[[], bytes]) -> bytes:
        asking = self._asked_by
        if asking.total() > MAX_WAITING or asking[tenant_id] >= MAX_WAITING_TENANT:
            message = "too many usage requests at the same time: try again later"
            raise ApiError(QUEUE_FULL, message, retry_after_s=1.0)
        asking[tenant_id] += 1
        future = asyncio.wrap_future(self._thread.submit(make))

        def on_made(made: "asyncio.Future[bytes]") -> None:
            asking[tenant_id] -= 1
            if not asking[tenant_id]:
                del asking[tenant_id]
            if not made.cancelled():
                made.exception()  # looked at, where its asker has gone

        future.add_done_callback(on_made)  # also where nobody awaits it any more
        try:
            return await asyncio.shield(future)
        except RegistryError as error:
            raise ApiError(INVALID_REQUEST, str(error)) from error
        except SQLAlchemyError as error:
            message = "usage cannot be read at the moment: try again later"
            raise ApiError(UNAVAILABLE, message, retry_after_s=1.0) from error

    def _usage(self, tenant_id: str, asked: _Asked, each: BucketSum) -> list[Json]:
        return [
            {
                "object": "organization.usage.completions.result",
                "input_tokens": each.prompt_tokens,
                "input_cached_tokens": each.cached_tokens,
                "output_tokens": each.completion_tokens,
                "num_model_requests": each.num_requests,
                **_owner(tenant_id, asked, each),
                "model": each.model if "model" in asked.groups else None,
                "batch": None,
            }
        ]

    def _costs(self, tenant_id: str, asked: _Asked, each: BucketSum) -> list[Json]:
        def cost(nanos: int, line_item: str | None) -> Json:
            return {
                "object": "organization.costs.result",
                "amount": {"value": nanos / NANOS, "currency": self._currency},
                "line_item": line_item,
                **_owner(tenant_id, asked, each),
            }

        if "line_item" not in asked.groups:
            return [cost(each.cost_nanos, None)]
        parts = {name: int(getattr(each, field)) for name, field in METERS.items()}
        parts = {"input": each.cost_nanos - sum(parts.values()), **parts}
        return [cost(nanos, f"{each.model}, {name}") for name, nanos in parts.items() if nanos]


def _page_of(
    query: BucketQuery, asked: _Asked, layout: _Layout, sums: Sequence[BucketSum]
) -> bytes:
    """Bucket by bucket, so that whoever makes it lets others at the interpreter in between."""
    results: dict[int, list[Json]] = {
        at: [] for at in range(query.from_at, query.to_at, query.width_s)
    }
    for each in sums:
        results[each.began_at] += layout(query.tenant_id, asked, each)
    buckets = [
        msgspec.Raw(
            msgspec.json.encode(
                {
                    "object": "bucket",
                    "start_time": at,
                    "end_time": at + query.width_s,
                    "results": found,
                }
            )
        )
        for at, found in results.items()
    ]
    has_more = query.to_at < asked.end
    return msgspec.json.encode(
        {
            "object": "page",
            "data": buckets,
            "has_more": has_more,
            "next_page": str(query.to_at) if has_more else None,
        }
    )


def _owner(tenant_id: str, asked: _Asked, each: BucketSum) -> Json:
    return {
        "project_id": tenant_id if "project_id" in asked.groups else None,
        "api_key_id": each.key_id if "api_key_id" in asked.groups else None,
        "user_id": None,
    }


def _one(found: Params, name: str, otherwise: str) -> str:
    values = found.get(name, ())
    if len(values) > 1:
        raise _invalid(name, "may be given only once")
    return values[0] if values else otherwise


def _many(found: Params, name: str) -> tuple[str, ...]:
    values = tuple(found.get(name, ()))
    if len(values) > MAX_NAMES:
        raise _invalid(name, f"may have at most {MAX_NAMES} values")
    if any("\0" in value for value in values):  # which PostgreSQL cannot be asked for
        raise _invalid(name, "must not contain NUL characters")
    return values


def _number(found: Params, name: str, otherwise: int | None, most: int) -> int:
    text = _one(found, name, "" if otherwise is None else str(otherwise))
    if not text:
        raise _invalid(name, "is required")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise _invalid(name, f"must be a whole number of at most {most}")
    return int(text)


def _invalid(name: str, says: str) -> ApiError:
    return ApiError(INVALID_REQUEST, f"{name} {says}", name)
