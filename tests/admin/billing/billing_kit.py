"""A ledger to bill from: tenants on plans, a price that changes inside an hour and a month, cache
hits, encoders, failures, seconds with a price, corrections of this month and the last."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gateway.auth.directory import price_book
from gateway.pricing.policy.pricing import Billed, Consumption, cost_of, micros
from registry.accounts import api_keys, tenants
from registry.money import ledger, plans, prices
from registry.money.ledger import Posting
from registry.money.plans import PlanDiscount, PlanPrice, TenantTerms
from registry.money.prices import PriceRecord
from registry.session import make_engine, writing
from tests.migrated import migrated
from tests.postgres import Databases

START = datetime(2025, 9, 30, 20, tzinfo=UTC).timestamp()
OCTOBER = datetime(2025, 10, 1, tzinfo=UTC).timestamp()
NOVEMBER = datetime(2025, 11, 1, tzinfo=UTC).timestamp()
CHANGE = OCTOBER + 2 * 3600 + 1234.5
MODELS = ("chat-model", "embedder")
NUM = 400


@contextmanager
def registry(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    """A fresh registry for a fixture that is parametrized by the database's kind."""
    url = f"sqlite:///{folder / 'polyhost.db'}"
    databases: Databases | None = None
    if request.param == "postgresql":
        databases = request.getfixturevalue("postgres")
        url = databases.fresh_registry()
    migrated(url)
    engine = make_engine(url)
    yield engine
    engine.dispose()
    if databases is not None:
        databases.drop(url)


@dataclass(frozen=True)
class Books:
    """What was posted, in order, and who is who."""

    tenants: dict[str, str]
    keys: dict[str, str]
    postings: list[Posting]

    @property
    def total(self) -> int:
        """What everything costs."""
        return sum(posting.cost_nanos for posting in self.postings)


def fill(engine: Engine, num: int = NUM) -> Books:
    """Put it all into a migrated registry."""
    with writing(engine, "test") as session:
        who = {
            name: tenants.create_tenant(session, name, now_at=0.0).id
            for name in ("acme", '=HYPERLINK("http://x")', "plain")
        }
        keys = {
            f"{name}/{n}": api_keys.create_key(session, tenant, f"@key {n}", now_at=0.0)[0].id
            for name, tenant in who.items()
            for n in range(2)
        }
        for price in (
            PriceRecord("chat-model", 0.0, 150, 15, 600, 0, 0, 0),
            PriceRecord("chat-model", CHANGE, 101, 11, 333, 0, 7_000_001, 1003),
            PriceRecord("embedder", 0.0, 20, 5, 0, 13, 0, 0),
        ):
            prices.set_price(session, price, now_at=0.0)
        plans.create_plan(session, PlanDiscount("partner", 0.0, 1250), now_at=0.0)
        plans.set_discount(session, PlanDiscount("partner", CHANGE + 60, 3333), now_at=0.0)
        own = PriceRecord("embedder", OCTOBER, 9, 3, 0, 7, 0, 0)
        plans.set_plan_price(session, PlanPrice("partner", OCTOBER, "embedder", own), now_at=0.0)
        terms = TenantTerms(who["acme"], START + 600, "partner", 777)
        plans.set_terms(session, terms, now_at=0.0)
        book = price_book(session)
    draw = random.Random(7)
    made: list[Posting] = []
    for number in range(num):
        tenant = draw.choice(sorted(who))
        key = keys[f"{tenant}/{draw.randrange(2)}"]
        kind = draw.choice(("chat", "chat", "completion", "embedding"))
        model = "embedder" if kind == "embedding" else "chat-model"
        outcome: Billed = draw.choice(
            ("finished", "finished", "finished", "disconnected", "cache_hit", "failed")
        )
        if kind == "embedding" and outcome == "cache_hit":
            outcome = "finished"
        arrived_at = START + number * 8 * 3600 / num + draw.random()
        posted_at = arrived_at + draw.random() * 9
        prompt = draw.randrange(1, 5000)
        cached = 0 if outcome == "cache_hit" else draw.randrange(prompt)
        made_tokens = 0 if kind == "embedding" else draw.randrange(900)
        service_s, load_s = draw.random() * 3, draw.random()
        used = Consumption(
            prompt,
            cached,
            made_tokens,
            micros(service_s),
            micros(load_s),
            is_encoder=kind == "embedding",
        )
        cost = cost_of(book.rates(who[tenant], model, arrived_at), outcome, used)
        made.append(
            Posting(
                request_id=f"r-{number:06}",
                tenant_id=who[tenant],
                key_id=key,
                model=model,
                revision="rev1",
                kind=kind,
                outcome=outcome,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=made_tokens,
                cost_nanos=cost.cost_nanos,
                service_s=service_s,
                queue_s=0.0,
                ttft_s=0.05,
                duration_s=0.2,
                posted_at=posted_at,
                arrived_at=arrived_at,
                load_s=load_s,
                input_nanos=cost.input_nanos,
                cached_nanos=cost.cached_nanos,
                output_nanos=cost.output_nanos,
                service_nanos=cost.service_nanos,
                load_nanos=cost.load_nanos,
                list_nanos=cost.list_nanos,
            )
        )
    made += [
        correction(made[1], "corr-1", -7, OCTOBER + 3 * 3600 + 5),
        correction(made[num - 1], "corr-2", 5, OCTOBER + 5 * 3600),
    ]
    made.sort(key=lambda posting: (posting.posted_at, posting.request_id))
    shuffled = draw.sample(made, len(made))  # they come in another order than that of posting
    post(engine, *shuffled)
    return Books(who, keys, made)


def correction(wrong: Posting, name: str, nanos: int, posted_at: float) -> Posting:
    """An entry that adds `nanos` to what `wrong` cost."""
    return replace(
        wrong,
        request_id=name,
        outcome="correction",
        kind="correction",
        corrects=wrong.request_id,
        cost_nanos=nanos,
        input_nanos=nanos,
        list_nanos=nanos,
        posted_at=posted_at,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        cached_nanos=0,
        output_nanos=0,
        service_nanos=0,
        load_nanos=0,
        service_s=0.0,
        load_s=0.0,
    )


def post(engine: Engine, *postings: Posting) -> None:
    """Into the ledger."""
    with writing(engine, "test") as session:
        ledger.post_many(session, postings)
