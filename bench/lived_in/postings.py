"""What tenants used: postings hour by hour, with days and weeks in them, priced as a gateway does.

Amounts come from the world's generator alone, so one seed gives one history; ids of tenants and
keys are the registry's own and differ each time.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from bench.lived_in.world import DAY_S, HOUR_S, TENANTS, KeyPlan, World
from gateway.auth.directory import price_book
from gateway.pricing.policy.pricing import Billed, Consumption, PriceBook, cost_of, micros
from registry.accounts.api_keys import KeyRecord
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from registry.session import appending, reading

BATCH = 1000
RECENT_S = 900.0
NUM_RECENT = 70
"""In the last minutes: what the page of fair shares looks at."""
TRAFFIC = sum(key.traffic for tenant in TENANTS for key in tenant.keys)


@dataclass(frozen=True, slots=True)
class _Asker:
    plan: KeyPlan
    record: KeyRecord
    share: float


class Traffic:
    """Postings up to any time; each span once. `per_day`: about how many."""

    def __init__(self, world: World, per_day: float) -> None:
        self._world = world
        self._per_day = per_day
        self._done_at = world.began_at
        self._number = 0
        self.num_posted = 0

    def run_until(self, at: float) -> None:
        """Post what was used until then, and roll it up. Keys that are not there ask nothing."""
        world = self._world
        with reading(world.base.engine) as session:
            book = price_book(session)
        rows = [self._posting(asker, done_at, book) for asker, done_at in self._asks(at)]
        rows.sort(key=lambda row: row.posted_at)
        billed = [row.request_id for row in rows if row.cost_nanos]
        world.last_request = billed[-1] if billed else world.last_request
        for begin in range(0, len(rows), BATCH):
            with appending(world.base.engine, "gateway") as session:
                self.num_posted += ledger.insert_postings(session, rows[begin : begin + BATCH])
        if rows:
            with appending(world.base.engine, "gateway") as session:
                upto = rollups.newest_seq(session)
                while rollups.roll(session, upto):
                    pass
        self._done_at = at

    def _askers(self) -> list[_Asker]:
        found = []
        for tenant in TENANTS:
            for plan in tenant.keys:
                record = self._world.keys.get((tenant.name, plan.name))
                if record is not None:
                    found.append(_Asker(plan, record, plan.traffic / TRAFFIC))
        return found

    def _asks(self, until: float) -> Iterator[tuple[_Asker, float]]:
        """Who asked, and when that was done: in each hour about as many as its share says."""
        rng, askers = self._world.rng, self._askers()
        at = self._done_at
        while at < until:
            next_at = min(until, (at // HOUR_S + 1) * HOUR_S)
            expected = self._per_day * (next_at - at) / DAY_S * self._tide(at)
            for asker in askers:
                wanted = expected * asker.share
                if asker.plan.name == "nightly batch":
                    wanted *= 6.0 if datetime.fromtimestamp(at, UTC).hour in (1, 2, 3) else 0.1
                for _ in range(int(wanted) + (rng.random() < wanted % 1)):
                    yield asker, rng.uniform(at, next_at)
            at = next_at
        last_at = self._world.ends_at
        if until >= last_at and askers:
            weights = [asker.share for asker in askers]
            for asker in rng.choices(askers, weights, k=NUM_RECENT):
                yield asker, rng.uniform(max(self._world.began_at, last_at - RECENT_S), last_at)

    def _tide(self, at: float) -> float:
        """Office hours, quiet weekends, and slow growth."""
        when = datetime.fromtimestamp(at, UTC)
        day = 0.4 + 1.3 * max(0.0, math.sin(math.pi * (when.hour - 6) / 14))
        week = 0.45 if when.weekday() >= 5 else 1.15
        grown = (at - self._world.began_at) / (self._world.ends_at - self._world.began_at)
        return day * week * (0.7 + 0.6 * grown)

    def _posting(self, asker: _Asker, posted_at: float, book: PriceBook) -> Posting:
        rng, plan = self._world.rng, asker.plan
        models = [name for name in plan.models if name in self._world.packs]
        model = rng.choices(models, [2.0] + [1.0] * (len(models) - 1))[0]
        facts = self._world.packs[model]
        is_encoder = facts.task == "embed"
        outcome = self._outcome(plan, is_encoder)
        prompt = 1 + round(rng.lognormvariate(math.log(plan.tokens[0]), 0.6))
        made = 0 if is_encoder else 1 + round(rng.lognormvariate(math.log(plan.tokens[1] + 2), 0.7))
        kept = round(prompt * rng.choice((0.0, 0.0, 0.25, 0.75))) if not is_encoder else 0
        slow = 8.0 if model == "atlas-instruct" else 1.0
        load_s = rng.uniform(0.4, 4.0) * (rng.random() < 0.03)
        prefill_s = (prompt - kept) * 2e-5 * slow * rng.uniform(0.8, 1.3)
        decode_s = made * 4e-4 * slow * rng.uniform(0.8, 1.3)
        queue_s = rng.expovariate(20.0) + (rng.expovariate(0.3) if rng.random() < 0.04 else 0.0)
        ttft_s = queue_s + load_s + prefill_s + 0.01
        duration_s = ttft_s + decode_s * rng.uniform(1.5, 4.0)
        if outcome == "cache_hit":
            kept, load_s, prefill_s, decode_s = 0, 0.0, 0.0, 0.0
            queue_s, ttft_s, duration_s = 0.0, 0.004, 0.004
        elif outcome == "failed":
            made = made // 4
        service_s = prefill_s + decode_s
        used = Consumption(prompt, kept, made, micros(service_s), micros(load_s), is_encoder)
        rates = book.rates(asker.record.tenant_id, model, posted_at - duration_s)
        bill = cost_of(rates, outcome, used)
        self._number += 1
        return Posting(
            request_id=f"chatcmpl-{rng.getrandbits(96):024x}{self._number:08x}",
            tenant_id=asker.record.tenant_id,
            key_id=asker.record.id,
            model=model,
            revision=facts.revision,
            kind="embedding" if is_encoder else "chat",
            outcome=outcome,
            prompt_tokens=prompt,
            cached_tokens=kept,
            completion_tokens=made,
            cost_nanos=bill.cost_nanos,
            service_s=service_s,
            queue_s=queue_s,
            ttft_s=ttft_s,
            duration_s=duration_s,
            posted_at=posted_at,
            arrived_at=posted_at - duration_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            load_s=load_s,
            **asdict(bill),
        )

    def _outcome(self, plan: KeyPlan, is_encoder: bool) -> Billed:
        drawn = self._world.rng.random()
        if drawn < plan.hits and not is_encoder:
            return "cache_hit"
        return "failed" if drawn > 0.985 else "disconnected" if drawn > 0.96 else "finished"
