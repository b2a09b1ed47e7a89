"""What /metrics shows, and the collectors that count without locks."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import ModelStatus, Outcome, SwapRecord, WorkerStatus
from gateway.dispatch.policy.reasons import OUTCOMES, REASONS_BEFORE_0_2, Reason
from gateway.metrics.counters import LabelCounts, TimeHistogram
from gateway.metrics.metrics import INTER_TOKEN_BUCKETS
from tests.gateway.edge_kit import client_of, key_record, make_kit

STATUS = WorkerStatus(
    epoch="e",
    worker_id="w0",
    free_requests=1,
    free_kv_bytes=1,
    lease_ttl_s=2.0,
    page_bytes=65536,
    num_pages=100,
    pages={"org/a/weights": 40, "org/a/kv": 25, "free": 35},
    models=[
        ModelStatus("org/a", "resident", 1, 1, 0, 0, 0.1),
        ModelStatus("b", "cold", 0, 0, 0, 0, -1),
    ],
    leases=[],
    swaps=[],
    counters={
        "preemptions": 3.0,
        "steps": 8.0,
        "batch_rows": 20.0,
        "step_rows_le_1": 3.0,
        "step_rows_le_8": 5.0,
    },
)


async def test_what_a_scrape_shows(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.statuses = [STATUS]
    for listener in kit.dispatcher.listeners:
        listener("w0", SwapRecord("org/a", "load", "disk", 1000, 0.25))
    kit.dispatcher.script = kit.speak("The game is afoot!")
    async with client_of(kit) as client:
        await client.chat(temperature=0)
        await client.chat(temperature=9)
        kit.use_keys(key_record(cache_mode="exact"))
        await client.chat(temperature=0)
        await client.chat(temperature=0)
    text = generate_latest(kit.edge.services.metrics_registry).decode()
    prompt = kit.ledger.posted[0].prompt_tokens
    generated = kit.ledger.posted[0].completion_tokens
    for line in (
        'polyhost_time_to_first_token_seconds_count{model_name="tiny"} 2.0',
        'polyhost_e2e_request_latency_seconds_count{model_name="tiny"} 2.0',
        'polyhost_request_queue_time_seconds_sum{model_name="tiny"} 0.25',
        f'polyhost_prompt_tokens_total{{model_name="tiny"}} {2.0 * prompt}',
        f'polyhost_generation_tokens_total{{model_name="tiny"}} {2.0 * generated}',
        'polyhost_request_success_total{finished_reason="stop",model_name="tiny"} 2.0',
        'polyhost_requests_ended_total{model_name="tiny",outcome="finished"} 2.0',
        'polyhost_request_errors_total{code="invalid_request"} 1.0',
        'polyhost_semantic_cache_requests_total{result="hit"} 1.0',
        'polyhost_semantic_cache_requests_total{result="miss"} 1.0',
        'polyhost_swaps_total{kind="load",model_name="org/a"} 1.0',
        'polyhost_swap_duration_seconds_count{kind="load",tier="disk"} 1.0',
        'polyhost_arena_pages{kind="weights",model_name="org/a",worker="w0"} 40.0',
        'polyhost_arena_pages{kind="free",model_name="",worker="w0"} 35.0',
        'polyhost_kv_cache_usage_ratio{worker="w0"} 0.25',
        'polyhost_model_residency{model_name="org/a",state="resident",worker="w0"} 1.0',
        'polyhost_num_preemptions_total{worker="w0"} 3.0',
        'polyhost_engine_steps{worker="w0"} 8.0',
        'polyhost_iteration_rows_bucket{le="1.0",worker="w0"} 3.0',
        'polyhost_iteration_rows_bucket{le="4.0",worker="w0"} 3.0',
        'polyhost_iteration_rows_bucket{le="8.0",worker="w0"} 8.0',
        'polyhost_iteration_rows_bucket{le="+Inf",worker="w0"} 8.0',
        'polyhost_iteration_rows_sum{worker="w0"} 20.0',
        'polyhost_num_requests_running{model_name="tiny"} 2.0',
        'polyhost_num_requests_waiting{model_name="tiny"} 1.0',
        'polyhost_service_seconds_total{tenant="ten_1"} 3.5',
        "polyhost_workers_lost_total 1.0",
        "polyhost_ledger_lag_seconds 0.0",
        "polyhost_limit_reservations_open 0.0",
        "polyhost_ready 1.0",
    ):
        assert line in text, line
    assert "_le_" not in text


async def test_decisions_are_counted_under_new_and_old_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename must not empty the dashboards and alerts of the release before."""
    kit = make_kit(tmp_path / "tiny")
    made = {"held/no model can be evicted": 3, "refusal/queue full": 2}
    snapshot = replace(kit.dispatcher.snapshot(), decisions=made)
    monkeypatch.setattr(kit.dispatcher, "snapshot", lambda: snapshot)
    lines = generate_latest(kit.edge.services.metrics_registry).decode().splitlines()
    new, old = "polyhost_dispatch_decisions_total", "polyhost_decisions_total"
    assert f'{new}{{kind="held",reason="no model can be evicted"}} 3.0' in lines
    assert f'{old}{{kind="held",reason="nobody gives way"}} 3.0' in lines
    for name in (new, old):
        assert f'{name}{{kind="refusal",reason="queue full"}} 2.0' in lines
        assert sum(line.startswith(f"{name}{{") for line in lines) == 2


def test_every_renamed_reason_is_one_that_is_given() -> None:
    given = {*get_args(Reason)}
    assert given >= REASONS_BEFORE_0_2.keys()
    assert not given & {*REASONS_BEFORE_0_2.values()}
    assert len({*REASONS_BEFORE_0_2.values()}) == len(REASONS_BEFORE_0_2)
    assert OUTCOMES.keys() == {*get_args(Outcome)}


async def test_latency_between_tokens(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.script = kit.speak_slowly("The game is afoot!", 0.02)
    async with client_of(kit) as client:
        await client.chat()
    text = generate_latest(kit.edge.services.metrics_registry).decode()
    name = 'polyhost_inter_token_latency_seconds_{}{{model_name="tiny"}} '
    num = re.search(re.escape(name.format("count")) + r"(\S+)", text)
    total = re.search(re.escape(name.format("sum")) + r"(\S+)", text)
    assert num is not None
    assert total is not None
    # Tokens that come with the first one are part of its latency.
    assert 1 <= float(num.group(1)) < kit.ledger.only.completion_tokens
    assert 0 < float(total.group(1)) < kit.ledger.only.duration_s


@pytest.mark.parametrize("name", ["time_to_first_token", "inter_token_latency"])
async def test_buckets_are_vllms(tmp_path: Path, name: str) -> None:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.script = kit.speak_slowly("The game")
    async with client_of(kit) as client:
        await client.chat()
    text = generate_latest(kit.edge.services.metrics_registry).decode()
    bounds = re.findall(rf'polyhost_{name}_seconds_bucket{{le="([^"]+)"', text)
    assert bounds[0] == ("0.001" if "first" in name else "0.01")
    assert bounds[-2:] == (["2560.0", "+Inf"] if "first" in name else ["80.0", "+Inf"])


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode().splitlines()
    return sorted(line for line in text if "_created" not in line)


def test_it_shows_what_prometheus_client_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = LabelCounts("x_ended", "Ended.", ["model", "how"], ours)
    counter = Counter("x_ended", "Ended.", ["model", "how"], registry=theirs)
    assert lines(ours) == lines(theirs)
    for model, how, amount in [("a", 'q"\n', 1), ("b", "ok", 2.5), ("a", 'q"\n', 3)]:
        counts.add(amount, model, how)
        counter.labels(model, how).inc(amount)
    assert lines(ours) == lines(theirs)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """What a scrape reads, without the times of creation."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_scrape_reads_what_prometheus_client_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours_times = TimeHistogram("t_seconds", "Times.", INTER_TOKEN_BUCKETS, ours)
    theirs_times = Histogram(
        "t_seconds", "Times.", ["model_name"], buckets=INTER_TOKEN_BUCKETS, registry=theirs
    )
    draw = random.Random(7)
    edges = [*INTER_TOKEN_BUCKETS, 0.0, 80.0, 1e9]
    for _ in range(500):
        model = draw.choice("ab")
        value_s, count = draw.choice([*edges, draw.expovariate(5.0)]), draw.choice([1, 1, 3])
        ours_times.of(model).observe(value_s, count)
        for _ in range(count):
            theirs_times.labels(model).observe(value_s)
    found, expected = samples(ours), samples(theirs)
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) <= 1e-6 * max(1, expected[key]) for key in expected)


def test_nothing_is_shown_before_something_is_observed() -> None:
    registry = CollectorRegistry()
    TimeHistogram("t_seconds", "Times.", (1.0,), registry)
    assert samples(registry) == {}
