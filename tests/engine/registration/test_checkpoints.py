"""docs/checkpoints.md says what the code does, and what it says can be hosted comes out right.

One of each structure here; all of them, with the probe of each, by `make soak`.
"""

import re

import pytest

from engine.registration.parity import TOLERANCE, probe_model
from engine.registration.preflight import KV_TOKENS
from tests.checkpoints_page import (
    DATA,
    HEAD,
    PAGE,
    Checkpoint,
    checkpoints,
    judge_checkpoint,
    num_parameters,
    render,
    row,
)

# Of each family and of each way to be published, the one that takes least; refusals of each kind.
JUDGED = frozenset(
    {
        *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507-FP8", "Qwen/Qwen3-30B-A3B"),
        *("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"),
        *("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3.6-27B"),
        *("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "meta-llama/Llama-3.2-1B-Instruct"),
        *("meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-2-2b-it"),
        *("google/gemma-3-1b-it", "google/gemma-3-4b-it", "google/gemma-4-E4B-it"),
        *("openai/gpt-oss-20b", "mistralai/Mistral-7B-Instruct-v0.3"),
        *("microsoft/Phi-3.5-mini-instruct", "HuggingFaceTB/SmolLM3-3B", "openai-community/gpt2"),
        *("deepseek-ai/DeepSeek-V3", "facebook/opt-125m", "EleutherAI/pythia-160m"),
        *("sentence-transformers/all-MiniLM-L6-v2", "BAAI/bge-reranker-v2-m3"),
    }
)


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(each, marks=() if each.id in JUDGED else pytest.mark.soak, id=each.id)
        for each in checkpoints()
    ],
)
def test_the_page_is_right_and_what_is_hosted_passes_the_probe(checkpoint: Checkpoint) -> None:
    judged = judge_checkpoint(checkpoint)
    assert row(judged) in PAGE.read_text(encoding="utf-8").splitlines()
    if judged.plan is None:
        assert judged.code
        return
    if checkpoint.parameters:
        assert num_parameters(judged) / 1e9 == pytest.approx(checkpoint.parameters, rel=0.01)
    assert probe_model(judged.plan) <= TOLERANCE


def test_the_page_lists_all_and_counts_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    states = dict(
        re.findall(r"^\| `([^`]+)` \|.* \| (hosted|refused)\b[^|]* \|", text, re.MULTILINE)
    )
    assert list(states) == [each.id for each in checkpoints()]
    assert len(states) >= 40
    hosted = list(states.values()).count("hosted")
    counts = {"total": len(states), "hosted": hosted, "refused": len(states) - hosted}
    assert text.startswith(HEAD.format(**counts, tokens=f"{KV_TOKENS:,}"))
    assert {each.id for each in checkpoints()} >= JUDGED
    folders = {path.name for path in DATA.iterdir() if path.is_dir()}
    assert folders == {each.id.replace("/", "--") for each in checkpoints()}


@pytest.mark.soak
def test_the_page_is_what_the_generator_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render()
