"""Counters over restarts: bounded loss, and nothing but counters is believed."""

import json
from pathlib import Path

import pytest

from gateway.dispatch.counter_checkpoint import NAME, CounterCheckpoint, LeadFile, read_leads
from gateway.dispatch.policy.fair_share import FairShare, UsedService


def share_with(**counters: float) -> FairShare:
    share = FairShare(30.0)
    for name, counter in counters.items():
        share.enqueue(name, 1.0)
        share.charge(name, UsedService(counter))
    return share


async def test_who_was_ahead_still_is_after_a_restart(tmp_path: Path) -> None:
    await CounterCheckpoint(
        LeadFile(tmp_path), share_with(low=100.0, ahead=7.0), FairShare(30.0)
    ).write()
    again = FairShare(30.0)
    await CounterCheckpoint(LeadFile(tmp_path), again, FairShare(30.0)).load()
    for name in ("stranger", "ahead", "low"):
        again.enqueue(name, 1.0)
    assert again.counter("ahead") - again.counter("low") == pytest.approx(7.0)
    assert again.counter("stranger") == again.counter("low")
    again.check_integrity()


async def test_a_debt_is_clamped_as_ever_when_its_tenant_comes_back(tmp_path: Path) -> None:
    await CounterCheckpoint(
        LeadFile(tmp_path), share_with(low=0.0, ahead=1e6), FairShare(30.0)
    ).write()
    again = FairShare(30.0)
    await CounterCheckpoint(LeadFile(tmp_path), again, FairShare(30.0)).load()
    again.enqueue("ahead", 2.0)
    assert again.counter("ahead") == 15.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "leads": {}}',
        '{"version": 1, "leads": [1]}',
        '{"version": 1, "leads": {"a": "much"}}',
        '{"version": 1, "leads": {"a": Infinity}}',
        '{"version": 1, "leads": {"a": NaN}}',
        '{"version": 1, "leads": {"a": 1' + "0" * 400 + "}}",
        "[" * 100_000,
    ],
)
async def test_a_file_that_makes_no_sense_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    share = FairShare(30.0)
    await CounterCheckpoint(LeadFile(tmp_path), share, FairShare(30.0)).load()
    assert share.leads() == {}


async def test_it_is_replaced_as_a_whole_and_only_when_something_changed(tmp_path: Path) -> None:
    share = share_with(a=0.0, b=1.0)
    file = CounterCheckpoint(LeadFile(tmp_path), share, FairShare(30.0))
    await file.write()
    (tmp_path / NAME).unlink()
    await file.write()
    assert not (tmp_path / NAME).exists()
    share.charge("b", UsedService(1.0))
    await file.write()
    assert json.loads((tmp_path / NAME).read_text())["leads"] == {"b": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


async def test_a_disk_that_fails_stops_nothing(tmp_path: Path) -> None:
    file = CounterCheckpoint(
        LeadFile(tmp_path / "not there"), share_with(a=0.0, b=1.0), FairShare(30.0)
    )
    await file.write()
    assert read_leads(tmp_path / "not there" / NAME) == {}


def test_leads_are_restored_at_the_start_only() -> None:
    with pytest.raises(ValueError, match="at the start"):
        share_with(a=1.0).restore_leads({"a": 3.0})
