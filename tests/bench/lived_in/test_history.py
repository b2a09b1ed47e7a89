"""Two days of the history that pages are looked at with: whole, exact, and the same for a seed."""

from pathlib import Path

import pytest
from argon2 import PasswordHasher
from sqlalchemy import func, select

from admin.context.operator_context import open_context
from bench.lived_in.history import write_history
from bench.lived_in.world import REFUSED, TENANTS
from gateway.settings.settings import Settings
from registry.accounts import api_keys, tenants, users
from registry.audit import AuditRow
from registry.models import catalog
from registry.money import alerts, invoices, ledger, prices, rollups
from registry.money.ledger import PostingRow
from tests.migrated import migrated

ENDS_AT = 1_793_620_800.0  # 2026-11-02, noon: a month is over within the two days
Told = list[tuple[str, str, int, int]]


def told(data_dir: Path, seed: int) -> Told:
    """Makes a history, checks it, and says who used what."""
    data_dir.mkdir()
    settings = Settings(data_dir=str(data_dir))
    migrated(settings.registry_url)
    with open_context(settings, "tests") as context:
        write_history(context, {}, ends_at=ENDS_AT, num_days=2, per_day=100, seed=seed)
        with context.reading() as session:
            ledger.check_integrity(session)
            rollups.check_integrity(session)
            assert len(tenants.list_tenants(session)) == len(TENANTS) == 13
            assert len(api_keys.list_keys(session)) == 23
            models = catalog.list_models(session)
            assert len(models) == 11
            assert {m.name for m in models if m.state == "failed"} == set(REFUSED)
            packs = [model.pack for model in models if model.state == "ready"]
            assert len(set(packs)) == len(packs) - 1  # two names of one
            assert len(users.list_users(session)) == 4
            assert invoices.list_invoices(session)
            assert alerts.list_alerts(session, 10)
            assert any(p.valid_from > ENDS_AT for p in prices.list_prices(session))
            times = session.scalars(select(AuditRow.at).order_by(AuditRow.id)).all()
            assert times == sorted(times)
            assert ENDS_AT - 2 * 86_400 <= times[0] <= times[-1] <= ENDS_AT
            rows = session.execute(
                select(
                    PostingRow.tenant_name,
                    PostingRow.outcome,
                    func.count(),
                    func.sum(PostingRow.cost_nanos),
                )
                .group_by(PostingRow.tenant_name, PostingRow.outcome)
                .order_by(PostingRow.tenant_name, PostingRow.outcome)
            )
            return [(name, outcome, num, cost) for name, outcome, num, cost in rows]


def test_a_history_is_whole_and_its_amounts_are_the_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(users, "PasswordHasher", lambda: quick)
    first = told(tmp_path / "first", 3)
    assert told(tmp_path / "again", 3) == first
    assert {"finished", "disconnected", "cache_hit", "correction"} <= {row[1] for row in first}
    assert 150 < sum(row[2] for row in first) < 700
