"""What a key with the scope `usage` is told: its own tenant's usage and costs, as OpenAI's client
reads them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, PermissionDeniedError, RateLimitError
from sqlalchemy import Engine

from gateway.http import usage_reports
from registry.accounts import api_keys, tenants
from registry.accounts.key_terms import INFERENCE, USAGE
from registry.errors import InvalidValue
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from registry.money.usage_buckets import bucket_sums
from registry.session import appending, make_engine, writing
from tests.gateway.edge_kit import KEY, PLENTY, Kit, key_record, make_kit, serving
from tests.migrated import migrated

DAY_S, HOUR_S = 86_400, 3600
TODAY = 20_000 * DAY_S
OURS, OTHERS, ASKS = "ten_1", "ten_2", "sk-usage"
POSTING = Posting(
    *("r0", OURS, "key_1", "tiny", "rev1", "chat", "finished", 10, 4, 6, 1000),
    *(0.25, 0.125, 0.5, 1.0, float(TODAY)),
    **{"cached_nanos": 100, "output_nanos": 600},  # type: ignore[arg-type]
)

POSTINGS = [
    POSTING,
    replace(POSTING, request_id="r1", posted_at=TODAY + HOUR_S * 1.5, key_id="key_2"),
    replace(POSTING, request_id="r2", posted_at=TODAY + HOUR_S * 1.5 + 61, model="large"),
    replace(POSTING, request_id="r3", posted_at=TODAY + HOUR_S * 30, kind="completion"),
    replace(POSTING, request_id="r4", posted_at=TODAY + HOUR_S * 30, kind="embedding"),
    replace(POSTING, request_id="r5", tenant_id=OTHERS, key_id="key_9"),
    replace(POSTING, request_id="r6", outcome="failed", cost_nanos=0),
    replace(POSTING, request_id="r7", posted_at=TODAY - 1.0),
]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path / 'data' / 'polyhost.db'}"
    (tmp_path / "data").mkdir()
    migrated(url)
    engine = make_engine(url)
    with appending(engine, "test") as session:
        ledger.post_many(session, POSTINGS)
    yield engine
    engine.dispose()


@pytest.fixture
async def kit(tmp_path: Path, engine: Engine) -> Kit:
    kit = make_kit(tmp_path / "tiny", data_dir=str(tmp_path / "data"))
    usage = replace(key_record(ASKS, "key_u"), scopes=frozenset({USAGE}))
    kit.directory.replace(2, [key_record(), usage], kit.directory.models(), PLENTY)
    return kit


@pytest.fixture
async def client(kit: Kit) -> AsyncIterator[AsyncOpenAI]:
    async with (
        serving(kit.app) as base,
        AsyncOpenAI(
            base_url=f"{base}/v1", api_key=KEY, admin_api_key=ASKS, max_retries=0
        ) as client,
    ):
        yield client


def roll(engine: Engine) -> None:
    with appending(engine, "test") as session:
        rollups.roll(session, rollups.newest_seq(session))


@pytest.mark.parametrize("rolled", [False, True])
async def test_completions_by_day(client: AsyncOpenAI, engine: Engine, rolled: bool) -> None:
    if rolled:
        roll(engine)
    page = await client.admin.organization.usage.completions(
        start_time=TODAY + 5, end_time=TODAY + 2 * DAY_S
    )
    assert not page.has_more
    assert [(each.start_time, each.end_time) for each in page.data] == [
        (TODAY, TODAY + DAY_S),
        (TODAY + DAY_S, TODAY + 2 * DAY_S),
    ]
    first, second = (each.results[0].to_dict() for each in page.data)
    assert first == {
        "object": "organization.usage.completions.result",
        "input_tokens": 30,
        "input_cached_tokens": 12,
        "output_tokens": 18,
        "num_model_requests": 3,
        **dict.fromkeys(("project_id", "api_key_id", "user_id", "model", "batch")),
    }
    assert second["num_model_requests"] == 1  # the embedding is none


@pytest.mark.parametrize("rolled", [False, True])
async def test_groups_and_filters(client: AsyncOpenAI, engine: Engine, rolled: bool) -> None:
    if rolled:
        roll(engine)
    page = await client.admin.organization.usage.completions(
        start_time=TODAY,
        end_time=TODAY + 2 * HOUR_S,
        bucket_width="1h",
        group_by=["model", "api_key_id", "project_id"],
        models=["tiny"],
    )
    found = [
        (bucket.start_time, row["model"], row["api_key_id"], row["project_id"])
        for bucket in page.data
        for row in (each.to_dict() for each in bucket.results)
    ]
    assert found == [
        (TODAY, "tiny", "key_1", OURS),
        (TODAY + HOUR_S, "tiny", "key_2", OURS),
    ]
    one = await client.admin.organization.usage.completions(
        start_time=TODAY, end_time=TODAY + DAY_S, api_key_ids=["key_2"], project_ids=[OURS]
    )
    assert one.data[0].results[0].to_dict()["num_model_requests"] == 1
    none = await client.admin.organization.usage.completions(
        start_time=TODAY, end_time=TODAY + DAY_S, project_ids=[OTHERS]
    )
    assert [each.results for each in none.data] == [[]]
    foreign = await client.admin.organization.usage.completions(
        start_time=TODAY, end_time=TODAY + DAY_S, api_key_ids=["key_9"]
    )
    assert [each.results for each in foreign.data] == [[]]


async def test_minutes_and_pages(client: AsyncOpenAI) -> None:
    begin = TODAY + HOUR_S + 1800
    found: list[tuple[int, int]] = []
    cursor: dict[str, Any] = {}
    for _ in range(3):
        page = await client.admin.organization.usage.completions(
            start_time=begin, end_time=begin + 150, bucket_width="1m", limit=1, **cursor
        )
        found += [(each.start_time, len(each.results)) for each in page.data]
        cursor = {"page": page.next_page}
    assert found == [(begin, 1), (begin + 60, 1), (begin + 120, 0)]
    assert not page.has_more
    assert page.next_page is None


@pytest.mark.parametrize("rolled", [False, True])
async def test_costs(client: AsyncOpenAI, engine: Engine, rolled: bool) -> None:
    if rolled:
        roll(engine)
    page = await client.admin.organization.usage.costs(start_time=TODAY, end_time=TODAY + 2 * DAY_S)
    sums: list[dict[str, Any]] = [each.results[0].to_dict() for each in page.data]
    amounts = [each["amount"] for each in sums]
    assert amounts == [
        {"value": 3000 / 1e9, "currency": "usd"},
        {"value": 2000 / 1e9, "currency": "usd"},
    ]
    page = await client.admin.organization.usage.costs(
        start_time=TODAY, end_time=TODAY + DAY_S, group_by=["line_item"]
    )
    rows: list[dict[str, Any]] = [each.to_dict() for each in page.data[0].results]
    assert [(row["line_item"], round(row["amount"]["value"] * 1e9)) for row in rows] == [
        ("large, input", 300),
        ("large, cached input", 100),
        ("large, output", 600),
        ("tiny, input", 600),
        ("tiny, cached input", 200),
        ("tiny, output", 1200),
    ]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"start_time": TODAY, "bucket_width": "1w"}, "bucket_width"),
        ({"start_time": TODAY, "limit": 32}, "limit"),
        ({"start_time": TODAY, "limit": 0}, "limit"),
        ({"start_time": TODAY, "page": "x"}, "page"),
        ({"start_time": -1}, "start_time"),
        ({"start_time": 10**30}, "start_time"),
        ({"start_time": "²"}, "start_time"),
        ({"start_time": ""}, "start_time"),
        ({"start_time": TODAY, "group_by": ["user_id"]}, "group_by"),
        ({"start_time": TODAY, "user_ids": ["u"]}, "user_ids"),
        ({"start_time": TODAY, "batch": True}, "batch"),
        ({"start_time": TODAY, "models": ["m"] * 101}, "models"),
        ({"start_time": TODAY, "models": ["tiny\0"]}, "models"),
    ],
)
async def test_what_cannot_be_told_is_refused(
    client: AsyncOpenAI, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.admin.organization.usage.completions(**params)
    assert refused.value.param == named


async def test_a_key_does_what_it_is_for(client: AsyncOpenAI) -> None:
    other = client.with_options(admin_api_key=KEY, api_key=ASKS)
    with pytest.raises(PermissionDeniedError):
        await other.admin.organization.usage.completions(start_time=TODAY)
    with pytest.raises(PermissionDeniedError):
        await other.models.list()
    with pytest.raises(PermissionDeniedError):
        await other.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}]
        )


@pytest.mark.parametrize("bound", ["MAX_WAITING", "MAX_WAITING_TENANT"])
async def test_few_may_wait_for_the_database(
    client: AsyncOpenAI, kit: Kit, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    usage = frozenset({USAGE})
    keys = [
        replace(key_record(ASKS, "key_u"), scopes=usage),
        replace(key_record("sk-theirs", "key_t", tenant_id=OTHERS), scopes=usage),
    ]
    kit.directory.replace(3, keys, kit.directory.models(), PLENTY)
    gate, is_refused = threading.Event(), asyncio.Event()
    monkeypatch.setattr(usage_reports, bound, 3)
    monkeypatch.setattr(
        usage_reports, "bucket_sums", lambda *args: gate.wait(20) and bucket_sums(*args)
    )

    async def ask(key: str = ASKS) -> int:
        try:
            usage_of = client.with_options(admin_api_key=key).admin.organization.usage
            await usage_of.completions(start_time=TODAY)
        except RateLimitError:
            is_refused.set()
            return 429
        return 200

    ours = [asyncio.create_task(ask()) for _ in range(8)]
    await is_refused.wait()
    # Of whom there are fewest may wait, others are let in all the same.
    theirs = asyncio.create_task(ask("sk-theirs"))
    if bound == "MAX_WAITING":
        assert await theirs == 429
    gate.set()
    found = await asyncio.gather(*ours)
    assert found.count(429) >= 1
    assert found.count(200) >= 3
    assert await theirs == (429 if bound == "MAX_WAITING" else 200)
    assert await ask() == 200


async def test_a_page_is_made_beside_the_event_loop(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    made = usage_reports._page_of

    def page_of(*args: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return made(*args)

    monkeypatch.setattr(usage_reports, "_page_of", page_of)
    await client.admin.organization.usage.costs(start_time=TODAY, end_time=TODAY + DAY_S)
    assert [name.partition("_")[0] for name in threads] == ["usage"]


def test_scopes_of_keys_are_of_those_that_there_are(engine: Engine) -> None:
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "acme", now_at=0.0)
        key, _ = api_keys.create_key(
            session, tenant.id, "both", now_at=0.0, scopes=[USAGE, INFERENCE, USAGE]
        )
        assert key.scopes == {INFERENCE, USAGE}
        plain, _ = api_keys.create_key(session, tenant.id, "plain", now_at=0.0)
        assert plain.scopes == {INFERENCE}
        for wrong in ([], ["admin"], ["usage", ""]):
            with pytest.raises(InvalidValue):
                api_keys.create_key(session, tenant.id, "no", now_at=0.0, scopes=wrong)
