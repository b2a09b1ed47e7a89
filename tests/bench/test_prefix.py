"""Prefix and pipeline benchmarks on a tiny model: prompts, arithmetic, whole result files."""

import gzip
import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench import in_process, lengths, pipeline, prefix
from bench.in_process import Ask
from tests.bench.tiny import use_tiny_shapes

WORDS = [f"w{i}" for i in range(1200)]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks of three questions each, and a tiny shape to ask them of."""
    use_tiny_shapes(tmp_path, monkeypatch)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write(tmp_path / lengths.TOKENIZER, [tokenizer.to_str()])
    prefixes = [{"task": f"t{i}", "prefix": " ".join(WORDS[i : i + 150])} for i in range(2)]
    questions = [
        {"id": f"t{i}-{j}", "task": f"t{i}", "input": WORDS[900 + j]}
        for i in range(2)
        for j in range(3)
    ]
    write(tmp_path / "prompts/bbh_prefixes.jsonl.gz", [json.dumps(row) for row in prefixes])
    write(tmp_path / "prompts/bbh_questions.jsonl.gz", [json.dumps(row) for row in questions])
    return tmp_path


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def test_questions_share_their_tasks_text_and_fit_the_context(data: Path) -> None:
    pack = in_process.make_pack("tiny", data)
    tokenizer = lengths.read_tokenizer(data)
    (text, questions), _ = prefix.read_tasks(data, 2, 3)
    asks = prefix.task_asks(tokenizer, text, questions, pack, max_tokens=1)
    assert len(asks) == 3
    shared = [ask.prompt_ids[:150] for ask in asks]
    assert shared[0] == shared[1] == shared[2]
    assert len({tuple(ask.prompt_ids) for ask in asks}) == 3
    # Longer than the tiny context of 256 tokens: cut, and still shared.
    cut = prefix.task_asks(tokenizer, text * 3, questions, pack, max_tokens=1)
    assert max(len(ask.prompt_ids) for ask in cut) <= 255
    assert cut[0].prompt_ids[:200] == cut[1].prompt_ids[:200]


def test_a_run_finds_prefixes_and_counts_misses(data: Path) -> None:
    output = data / "out.json"
    arguments = [str(data), "--model", "tiny", "--tasks", "2", "--questions", "3"]
    arguments += ["--miss-model", "tiny", "--pairs", "2", "--warm-up-pairs", "1", "--requests", "4"]
    arguments += ["--width", "2", "--miss-prompt-tokens", "64", "--miss-output-tokens", "4"]
    arguments += ["--work-dir", str(data), "--output", str(output)]
    assert prefix.main(arguments) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    hits, misses = result["hits"], result["misses"]
    assert len(hits["rows"]) == 4
    assert hits["hit_share"] > 0.8
    assert hits["ratio_of_sums"]["n"] == 4
    assert misses["hit_tokens"] == 0
    assert misses["loop_of_whole"]["pairs"] == 2
    assert 0 < misses["loop_cpu_ms_per_step"] < misses["cpu_ms_per_step"]
    assert "goal +1%" in prefix.table(result)


def test_the_cost_leaves_the_models_own_noise_out() -> None:
    row = {"with_s": 12.0, "loop_with_s": 1.1, "without_s": 10.0, "loop_without_s": 1.0}
    row |= {"steps": 100.0, "cached_tokens": 0.0}
    found = prefix.misses_summary([row, row], {"kv_evicted_pages": 3.0})
    assert found["whole"]["cost"] == pytest.approx(0.2)
    assert found["loop_of_whole"]["cost"] == pytest.approx(0.01)
    assert found["loop_of_loop"]["cost"] == pytest.approx(0.1)
    assert found["cpu_ms_per_step"] == pytest.approx(100.0)


def test_the_model_clock_counts_only_while_entered(data: Path) -> None:
    pack = in_process.make_pack("tiny", data)
    clock = in_process.ModelClock()
    with in_process.hosting(pack, [{}], in_process.kv_bytes(pack, 4, 64)) as (host,):
        with clock:
            done = host.run([Ask([5, 6, 7], 4)], 1, clock)
        assert 0 < done.model_cpu_s <= done.cpu_s + time.get_clock_info("thread_time").resolution
        assert host.run([Ask([5, 6, 7], 4)], 1, clock).model_cpu_s == 0.0
        assert done.num_tokens == 4
        assert len(done.ttft_s) == 1


def test_the_pipeline_is_compared_at_every_batch_size(data: Path) -> None:
    output = data / "pipeline.json"
    arguments = ["--models", "tiny", "--batch", "1", "2", "--repeats", "2", "--prompt-tokens", "5"]
    arguments += [
        "--output-tokens",
        "3",
        "--per-slot",
        "1",
        "--work-dir",
        str(data),
        "--output",
        str(output),
    ]
    assert pipeline.main(arguments) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert [row["batch"] for row in result["rows"]] == [1, 2]
    assert all(len(row["gain"]["values"]) == 2 for row in result["rows"])
    assert all(0 < row["host_share"]["median"] < 1 for row in result["rows"])
    assert "tiny" in pipeline.table(result)
