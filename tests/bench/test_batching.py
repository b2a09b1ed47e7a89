"""Batching benchmark: the ideal's arithmetic, the three ways on a tiny model, the table."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import batching, in_process
from bench.in_process import Ask, Run
from tests.bench.tiny import use_tiny_shapes


def test_the_ideal_counts_longest_answers_against_all_tokens() -> None:
    best = batching.ideal([1, 9, 2, 4, 10], width=2)
    assert (best.static_steps, best.packed_steps) == (9 + 4 + 10, 13)
    assert best.ratio == 23 / 13
    # Slots: 1, 2, 4 then 10 there, and 9 in the other.
    assert best.in_order_steps == 17
    assert batching.ideal([5, 5, 5, 5], width=2).ratio == 1.0
    # One long answer: nothing can be quicker than it.
    assert batching.ideal([1, 1, 1, 50], width=4).packed_steps == 50


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 16))
def test_perfect_packing_is_never_slower_than_static(answers: list[int], width: int) -> None:
    best = batching.ideal(answers, width)
    assert best.packed_steps <= best.in_order_steps <= best.static_steps
    assert best.packed_steps * width >= sum(answers)


def test_shares_are_of_each_repeats_own_ratio() -> None:
    def run(steps: int, seconds: float) -> Run:
        return Run(wall_s=seconds, num_steps=steps, num_tokens=100)

    runs: dict[batching.Mode, list[Run]] = {
        "continuous": [run(10, 1.0), run(10, 2.0)],
        "static": [run(30, 2.0), run(30, 8.0)],
    }
    row = batching.summary(runs, batching.Ideal(40, 10, 12))
    assert row["ideal_ratio"] == 4.0
    assert row["static"]["step_share"]["median"] == pytest.approx(0.75)
    assert row["static"]["time_ratio"]["values"] == [2.0, 4.0]
    assert row["static"]["time_share"]["median"] == pytest.approx(0.75)


@pytest.fixture
def tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_shapes(tmp_path, monkeypatch)


def test_static_batches_run_until_their_longest_ends(tmp_path: Path, tiny_shapes: None) -> None:
    asks = [Ask([7 + i, 3, 5], tokens) for i, tokens in enumerate([2, 9, 3, 4, 6])]
    pack = in_process.make_pack("tiny", tmp_path)
    with in_process.hosting(pack, [{"max_num_seqs": 2}], 16 << 20) as (host,):
        runs = {mode: batching.run_mode(host, mode, asks, 2) for mode in batching.MODES}
    best = batching.ideal([ask.max_tokens for ask in asks], 2)
    assert {run.num_tokens for run in runs.values()} == {24}
    assert runs["continuous"].num_steps == best.in_order_steps < best.static_steps
    assert runs["static"].num_steps >= best.static_steps
    assert runs["ragged"].num_steps == runs["static"].num_steps


def test_a_run_writes_every_ratio(tmp_path: Path, tiny_shapes: None) -> None:
    trace = "t_s,in_tokens,out_tokens\n" + "".join(f"{i},{i + 1},{9 * i + 9}\n" for i in range(9))
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/azure2023_conv.csv.gz").write_bytes(gzip.compress(trace.encode()))
    output = tmp_path / "out.json"
    arguments = [str(tmp_path), "--model", "tiny", "--lengths", "azure2023_conv", "--batch", "2"]
    arguments += ["--per-slot", "4", "--repeats", "2", "--work-dir", str(tmp_path)]
    assert batching.main([*arguments, "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert row["scale"] == 0.12
    assert row["static"]["step_ratio"]["median"] > 1.0
    assert len(row["static"]["time_ratio"]["values"]) == 2
    assert "azure2023_conv" in batching.table(result)
