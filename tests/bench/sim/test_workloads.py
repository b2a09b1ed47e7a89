"""Streams of arrivals: rates, order, patterns, prompts that share, determinism, laziness."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.sim import workloads
from bench.sim.batches import Batch, join
from bench.sim.casting import Cast, Habits
from bench.sim.spec import WorkloadError, parse_workload
from bench.sim.types import Arrival
from bench.sim.workloads import open_workload
from tests.bench.sim.trace_files import NUM_CONVERSATIONS, TURNS, write_csv, write_traces


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small traces."""
    return write_traces(tmp_path_factory.mktemp("data"))


def arrivals(
    text: str, data: Path | None = None, tenants: int = 10, models: int = 5, seed: int = 1
) -> list[Arrival]:
    """The whole workload."""
    return list(open_workload(parse_workload(text, data), tenants, models, seed))


NAMES = ("azure2023_conv", "mooncake_conversation", "arena27_multimodel", "gentd26", "burstgpt")


@pytest.mark.parametrize("name", ["synthetic", "servegen", "servegen_m-small", *NAMES])
def test_every_source_keeps_rate_order_and_places(name: str, data: Path) -> None:
    found = arrivals(f"{name}:rate=30,minutes=4", data)
    # Conversations and bursty clients come in lumps: the bound is for a few in a lump.
    assert len(found) == pytest.approx(7200, rel=0.12)
    times = [arrival.at_s for arrival in found]
    assert times == sorted(times)
    assert 0 <= times[0] < 2
    assert 238 < times[-1] < 240
    assert {arrival.tenant for arrival in found} <= set(range(10))
    assert {arrival.model for arrival in found} == set(range(5))
    assert all(a.output_tokens >= 1 and a.prompt_tokens >= 1 for a in found)


def test_a_trace_runs_once_at_its_own_pace(data: Path) -> None:
    found = arrivals("azure2023_conv", data)
    assert [arrival.at_s for arrival in found] == list(map(float, range(200)))
    assert [arrival.prompt_tokens for arrival in found[:3]] == [100, 101, 102]
    assert len(arrivals("azure2023_conv:requests=450", data)) == 450


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "own.csv.gz",
        ("t_s", "in_tokens", "out_tokens", "tenant", "model"),
        [(place, 5, 6, f"t{place % 2}", f"m{place % 3}") for place in range(60)],
    )
    found = arrivals(str(path), tenants=2, models=3)
    assert len(Counter(a.tenant for a in found[::2])) == 1
    assert len(Counter(a.model for a in found[::3])) == 1
    assert len(Counter(a.model for a in found)) == 3


def test_the_seed_says_all(data: Path) -> None:
    text = "servegen:rate=20,minutes=2,aborts=0.3,flood=tenant1@5-50x10,diurnal=0.5@60"
    one = arrivals(text, data)
    assert one == arrivals(text, data)
    assert one != arrivals(text, data, seed=2)


def test_it_is_lazy() -> None:
    endless = open_workload(parse_workload("synthetic:rate=1000,requests=1000000000"), 10, 5)
    found = list(itertools.islice(endless, 100_000))
    assert found[-1].at_s == pytest.approx(100.0, rel=0.05)
    assert len({a.prompt[0][0] for a in found}) == 100_000


def test_prompts_share_what_their_conversation_said(data: Path) -> None:
    found = arrivals("mooncake_conversation:speed=1", data, tenants=4, models=3)
    assert len(found) == NUM_CONVERSATIONS * TURNS
    seen: set[tuple[int, int, int]] = set()
    hits = 0
    for arrival in found:
        assert [tokens for _, tokens in arrival.prompt[:-1]] == [512] * (len(arrival.prompt) - 1)
        assert arrival.prompt[-1][1] == 100
        for content, _ in arrival.prompt[1:-1]:
            hits += (arrival.tenant, arrival.model, content) in seen
            seen.add((arrival.tenant, arrival.model, content))
    # The second turn repeats one block of its conversation, the third two, for the same tenant.
    assert hits == NUM_CONVERSATIONS * (1 + 2)


def test_scaled_prompts_still_share(data: Path) -> None:
    found = arrivals("mooncake_conversation:scale=0.125", data)
    assert {tokens for a in found for _, tokens in a.prompt[:-1]} == {64}
    assert {a.prompt_tokens % 64 for a in found} == {12}


def test_lengths_are_cut_and_asked_for(data: Path) -> None:
    found = arrivals("azure2023_conv:max_prompt=103,max_output=12,max_tokens=exact", data)
    assert max(a.prompt_tokens for a in found) == 103
    assert max(a.output_tokens for a in found) == 12
    assert all(a.max_tokens == a.output_tokens for a in found)
    assert {a.max_tokens for a in arrivals("azure2023_conv:max_tokens=77", data)} == {77}


def test_a_flood_is_one_tenants_and_ends() -> None:
    text = "synthetic:rate=50,minutes=3"
    calm = arrivals(text)
    found = arrivals(f"{text},flood=tenant3@60-120x10")
    assert len(found) - len(calm) == pytest.approx(60 * 10 * 50 / 10, rel=0.1)
    more = Counter(a.tenant for a in found)
    more.subtract(Counter(a.tenant for a in calm))
    assert {tenant for tenant, number in more.items() if number} == {3}
    outside = [a for a in found if not 60 <= a.at_s < 120]
    assert [a[:3] for a in outside] == [a[:3] for a in calm if not 60 <= a.at_s < 120]
    # Its lengths are like everybody's.
    flood = [a.prompt_tokens for a in found if a.tenant == 3 and 60 <= a.at_s < 120]
    assert np.median(flood) == pytest.approx(1020, rel=0.15)


def test_a_spray_asks_for_all_the_rarely_used_models() -> None:
    text = "synthetic:rate=50,minutes=2,spray=tenant3@60-120x20"
    found = arrivals(text, models=100)
    shares = Cast(10, 100, 1, Habits()).model_shares
    asked = Counter(a.model for a in found if 60 <= a.at_s < 120 and a.tenant == 3)
    rare = set(np.argsort(shares)[:50].tolist())
    assert all(asked[model] > 50 for model in rare)


def test_days_and_nights_keep_the_mean() -> None:
    found = arrivals("synthetic:rate=100,minutes=4,diurnal=0.8@120")
    assert len(found) == pytest.approx(24_000, rel=0.03)
    thirds = np.histogram([a.at_s % 120 for a in found], bins=4, range=(0, 120))[0]
    assert thirds[1] > 3 * thirds[2]
    assert thirds[0] == pytest.approx(thirds[1], rel=0.05)
    # Also over half a day, in which the mean level is not 1.
    assert len(arrivals("synthetic:rate=100,seconds=60,diurnal=0.8@120")) == pytest.approx(
        6000, rel=0.05
    )


def test_hours_are_those_of_the_data(data: Path) -> None:
    found = arrivals("burstgpt:rate=100,minutes=1,speed=1440", data)
    by_hour = np.histogram([a.at_s / 2.5 for a in found], bins=24, range=(0, 24))[0]
    assert by_hour[20:].mean() / by_hour[:4].mean() == pytest.approx(315 / 115, rel=0.15)


def test_some_clients_leave() -> None:
    found = arrivals("synthetic:rate=100,minutes=2,aborts=0.25@4")
    patience = [a.abort_after_s for a in found if a.abort_after_s >= 0]
    assert len(patience) / len(found) == pytest.approx(0.25, abs=0.02)
    assert np.mean(patience) == pytest.approx(4.0, rel=0.1)
    assert all(a.abort_after_s == -1 for a in arrivals("synthetic:rate=10,minutes=1"))


def test_clients_of_a_provider_differ_and_lend_their_lengths(data: Path) -> None:
    found = arrivals("servegen:rate=50,minutes=10", data)
    by_tenant = Counter(a.tenant for a in found)
    (_, most), (_, less) = by_tenant.most_common()
    assert most / less == pytest.approx(4.0, rel=0.15)
    assert {a.output_tokens for a in found} == {5}
    assert np.median([a.prompt_tokens for a in found]) == pytest.approx(100, rel=0.1)
    assert min(a.prompt_tokens for a in found) >= 10
    assert max(a.prompt_tokens for a in found) <= 800


def test_clients_fall_silent_where_the_data_do(data: Path) -> None:
    """The second client sends in every other window of ten minutes; `start` and `speed` count."""
    found = arrivals("servegen:rate=10,minutes=4,speed=5,start=600", data)
    quiet = {a.tenant for a in found if a.at_s < 119}
    assert len(quiet) == 1
    assert len({a.tenant for a in found if 121 < a.at_s < 239}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("azure2023_conv", "give the folder"),
        ("missing.csv", "synthetic:rate=5,minutes=10"),
        ("synthetic:rate=5,minutes=1,flood=tenant10@1-2x3", "the last is tenant9"),
    ],
)
def test_what_cannot_be_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        open_workload(parse_workload(text), 10, 5)


def test_a_folder_without_the_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="azure2023_conv"):
        open_workload(parse_workload("azure2023_conv", tmp_path), 10, 5)


def test_windows_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watched(batches: list[Batch]) -> Batch:
        joined = join(batches)
        sizes.append(len(joined))
        return joined

    monkeypatch.setattr(workloads, "join", watched)
    arrivals("synthetic:rate=2000,requests=200000,flood=tenant0@10-60x10")
    assert max(sizes) < 1.5 * workloads.ROWS_AT_ONCE
