"""The table of families says what the code does, and what it says can be hosted can be served.

A part of docs/families.md is judged anew here, of every kind of row; everything by `make soak` and
`python -m bench.families --check docs/families.md`.
"""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from bench.families import Hosted, Refused, contradictions, judge, main, page
from bench.family_configs import MODEL_TYPES, tiny_config
from engine.errors import RegistrationRefused
from engine.pack import read_index
from engine.registration.blueprint import blueprint, config_geometries
from engine.registration.parity import TOLERANCE, probe
from kernels.paged_attention import LayerGeometry
from tests.engine.test_engine import Driver
from tests.engine.tiny_models import TinyModel, make_tiny_models, wrapper_configs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "families.md"
HOSTED = ("plain modules", "text class", "flat wrapper")
ROW = re.compile(rf"^\| `([^`]+)` \| (source|blueprint|probe|{'|'.join(HOSTED)}) \|", re.MULTILINE)
NEW_TOKENS = 12
NUM_PAGES = 400

# Of each kind of row: geometries, windows, caps, sinks, experts, positions; refusals of each step.
JUDGED = (
    *("cohere2", "dbrx", "gemma2", "gemma4_text", "gpt_bigcode", "gpt_oss", "jetmoe"),
    *("mimo_v2_flash", "ministral3", "modernbert-decoder", "phimoe", "qwen3_moe"),
    *("diffllama", "doge", "roberta", "hrm_text", "deepseek_v3", "dots3_note_text", "falcon"),
    *("bloom", "jamba", "lfm2", "llama4_text", "minimax_m3_vl_text", "gemma3n_text", "mamba"),
    *("whisper", "musicgen", "git", "gemma3", "qwen2_5_vl", "cohere2_vision", "idefics3"),
    *("qwen3_vl_moe", "qwen3_5", "mllama", "blip", "qwen2_5_omni"),
)
SERVED = (
    "deepseek_v3",
    "gpt2",
    "opt",
    "gpt_bigcode",
    "mixtral",
    "cohere2",
    "gemma4_text",
    "mimo_v2_flash",
)


def told() -> dict[str, str]:
    """Family -> how its layers run, or the step that refuses it, as the page says."""
    return dict(ROW.findall(PAGE.read_text(encoding="utf-8")))


def told_hosted() -> list[str]:
    """The families that the page says can be hosted."""
    return sorted(family for family, how in told().items() if how in HOSTED)


def test_the_page_has_a_row_for_every_type_transformers_registers() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    registered = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    assert sorted(family for family, _ in rows) == sorted(registered)
    assert set(MODEL_TYPES) == registered
    counts = re.search(
        r"\*\*(\d+) can be hosted\*\*, (\d+) are refused",
        " ".join(PAGE.read_text(encoding="utf-8").split()),
    )
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [
        len(told_hosted()),
        len(rows) - len(told_hosted()),
    ]
    assert len(told_hosted()) >= 130


@pytest.mark.parametrize("family", JUDGED)
def test_the_page_is_right(family: str) -> None:
    verdict = judge(family)
    assert not list(contradictions(PAGE.read_text(encoding="utf-8"), [verdict]))
    if isinstance(verdict, Hosted):
        assert verdict.error <= TOLERANCE
        assert verdict.kv_bytes >= verdict.least_bytes


@pytest.mark.soak
def test_the_whole_page_is_right() -> None:
    assert main(["--check", str(PAGE)]) == 0


def test_a_wrong_page_is_found_out() -> None:
    llama = Hosted("llama", "", 1e-6, 512, 512)
    mamba = Refused("mamba", "blueprint", "unknown_family", "it has no attention heads")
    text = page([llama, mamba])
    assert not list(contradictions(text, [llama, mamba]))
    assert not list(contradictions(text, [Hosted("llama", "", 7e-5, 512, 512)]))
    for wrong in (
        Hosted("llama", "", 1e-6, 1024, 512),
        Hosted("mamba", "", 1e-6, 512, 512),
        Refused("llama", "probe", "parity", "its logits differ"),
        Refused("mamba", "probe", "parity", "it has no attention heads"),
    ):
        assert list(contradictions(text, [wrong])) == [wrong.line()]


def serve(models: dict[str, TinyModel]) -> None:
    """Each model's greedy tokens of three requests at once are those of `generate`."""
    for name, model in models.items():
        driver = Driver({name: model}, NUM_PAGES)
        driver.make_resident(name)
        prompts = [
            [(37 * i + 11 * j) % 90 + 3 for j in range(n)] for i, n in enumerate((25, 9, 17))
        ]
        for number, prompt in enumerate(prompts):
            driver.submit(str(number), name, prompt, NEW_TOKENS)
        driver.run(lambda driver=driver: len(driver.finishes) == 3)  # type: ignore[misc]
        for number, prompt in enumerate(prompts):
            assert driver.tokens[str(number)] == model.generate(prompt, NEW_TOKENS), name
        driver.engine.close()
        driver.backend.close()


@pytest.mark.parametrize("family", SERVED)
def test_a_hosted_family_is_served(family: str, tmp_path: Path) -> None:
    assert told()[family] == "plain modules"
    serve(make_tiny_models(tmp_path, {family: tiny_config(family)}))


@pytest.mark.soak
def test_every_hosted_family_is_served(tmp_path: Path) -> None:
    for family in told_hosted():
        if told()[family] == "plain modules":
            serve(make_tiny_models(tmp_path / family, {family: tiny_config(family)}))


WRAPPERS = {
    "gemma3": "Gemma3ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
}


@pytest.mark.parametrize("family", WRAPPERS)
def test_a_wrapper_is_served_without_its_towers(family: str, tmp_path: Path) -> None:
    models = make_tiny_models(tmp_path, {family: wrapper_configs()[family]})
    index = read_index(models[family].pack_dir)
    assert index.architecture == WRAPPERS[family]
    assert not any("vis" in entry.name for entry in index.tensors)
    serve(models)


def test_geometry_comes_from_the_modules_where_names_do_not_tell() -> None:
    mimo = tiny_config("mimo_v2_flash")
    full, swa = LayerGeometry(1, 16, 8, 0), LayerGeometry(2, 16, 8, 6)
    assert config_geometries(mimo)[0] == LayerGeometry(1, 16, 16, 0)
    groups = {
        LayerGeometry(g.num_kv_heads, g.k_dim, g.v_dim, g.window): g.layers
        for g in blueprint(mimo).kv_groups
    }
    kinds = [swa if kind == "sliding_attention" else full for kind in mimo.layer_types]
    assert groups == {
        kind: tuple(i for i, other in enumerate(kinds) if other == kind) for kind in (full, swa)
    }


REFUSED = {
    "attends to later tokens": AutoConfig.for_model(
        "bert-generation",
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 96, "vocab_size": 128, "is_decoder": False},
    ),
    "it has cross-attention": AutoConfig.for_model(
        "gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=128, add_cross_attention=True
    ),
    "no valid context length": AutoConfig.for_model("llama", max_position_embeddings=0),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_options_that_cannot_be_hosted_are_refused(reason: str) -> None:
    with pytest.raises(RegistrationRefused, match=reason):
        probe(blueprint(REFUSED[reason]).config)


def test_a_model_that_fails_at_work_is_refused() -> None:
    config = tiny_config("llama")
    config.num_key_value_heads = 3
    with pytest.raises(RegistrationRefused, match="cannot run with a paged KV cache"):
        probe(config)
