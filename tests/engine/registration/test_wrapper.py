"""Multimodal wrappers become text models: the right tensors under any published name, no others.

What is served of them is compared with `generate` in tests/engine/running/test_families.py.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.modules.text_part import from_config
from engine.modules.transformers_backend import build_skeleton
from engine.pack import BLOB_NAME, PackIndex, read_index
from engine.packs.weights import build_views
from engine.registration.convert import inspect, write_pack
from engine.registration.encoder_blueprint import plan_model
from engine.registration.parity import TOLERANCE, agrees, probe_model
from engine.registration.source import load_config
from engine.registration.wrapper import MAX_LAYERS, class_config
from tests.engine.pack_rig import edit_json
from tests.engine.registration.quantized_kit import KINDS, write_checkpoint
from tests.engine.tiny_models import save_folder, wrapper_configs

Rename = Callable[[str], str]


def _llava_before(name: str) -> str:
    """Names before transformers 4.52."""
    name = name.removeprefix("model.")
    return {
        "language_model": f"language_model.model{name.removeprefix('language_model')}",
        "lm_head": f"language_model.{name}",
    }.get(name.partition(".")[0], name)


def _qwen_before(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


PUBLISHED: dict[str, tuple[str, Rename]] = {
    "gemma3 new": ("gemma3", str),
    "gemma3 old": ("gemma3", _llava_before),
    "cohere2_vision new": ("cohere2_vision", str),
    "qwen2_5_vl new": ("qwen2_5_vl", str),
    "qwen2_5_vl old": ("qwen2_5_vl", _qwen_before),
}
PREFIXES = {"gemma3": ("model.language_model.", "model.")}


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    save_folder(wrapper_configs()["gemma3"], tmp_path / "gemma3", 0)
    return tmp_path / "gemma3"


def _register(folder: Path, dest: Path) -> tuple[Path, PackIndex]:
    return write_pack(inspect(folder), dest, "float32", lambda *_: None)


def _tensors(pack_dir: Path, index: PackIndex) -> dict[str, torch.Tensor]:
    blob = torch.from_numpy(np.fromfile(pack_dir / BLOB_NAME, dtype=np.uint8))
    return build_views(blob, index, [segment.offset for segment in index.segments], 1).tensors


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("published", PUBLISHED)
def test_published_names_load_and_towers_do_not(tmp_path: Path, published: str) -> None:
    family, rename = PUBLISHED[published]
    model = save_folder(wrapper_configs()[family], tmp_path / "model", 0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file({rename(name): t for name, t in state.items()}, tmp_path / "model/model.safetensors")
    pack_dir, index = _register(tmp_path / "model", tmp_path / "packs")
    found = _tensors(pack_dir, index)
    old, new = PREFIXES.get(family, ("", ""))
    text = {name for name in model.state_dict() if name.startswith(("model.lang", "lm_head"))}
    assert found.keys() == {name.replace(old, new, 1) for name in text}
    for name in text:
        assert torch.equal(found[name.replace(old, new, 1)], model.state_dict()[name]), name


def test_the_pack_of_a_text_class_is_like_any_other(gemma: Path, tmp_path: Path) -> None:
    edit_json(gemma / "config.json", lambda c: c.update(eos_token_id=[7, 9]))
    pack_dir, index = _register(gemma, tmp_path / "packs")
    config = AutoConfig.from_pretrained(pack_dir)
    assert (config.model_type, index.family) == ("gemma3_text", "gemma3_text")
    # The wrapper says whether the head is the embedding; its text part says otherwise.
    assert config.tie_word_embeddings
    assert index.tied
    assert config.eos_token_id == [7, 9]
    assert build_skeleton(pack_dir, torch.float32).state_dict().keys() == {
        *(entry.name for entry in index.tensors),
        *index.tied,
    }


def test_a_flat_pack_keeps_the_wrapper_s_configuration(tmp_path: Path) -> None:
    save_folder(wrapper_configs()["qwen2_5_vl"], tmp_path / "model", 0)
    pack_dir, index = _register(tmp_path / "model", tmp_path / "packs")
    copied = (pack_dir / "config.json").read_text()
    assert copied == (tmp_path / "model" / "config.json").read_text()
    assert build_skeleton(pack_dir, torch.float32).state_dict().keys() == {
        entry.name for entry in index.tensors
    }


def test_the_text_class_is_chosen_where_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(tiny_config("llava"))
    assert not agrees(tiny_config("qwen2_vl"))  # has none
    vision = tiny_config("cohere2_vision")
    assert vision.text_config.logit_scale != 1
    assert not agrees(vision)
    vision.text_config.logit_scale = 1.0
    assert agrees(vision)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_quantized_text_part_is_read_as_its_values(
    family: str, name: str, tmp_path: Path
) -> None:
    kind = replace(
        KINDS[name],
        model=lambda: wrapper_configs()[family],
        quantizes=lambda tensor: "layers" in tensor and "down_proj.weight" in tensor,
        extra={},
    )
    twin = write_checkpoint(tmp_path / "model", kind)
    made, index = _register(tmp_path / "model", tmp_path / "packs")
    plain, wanted = _register(twin, tmp_path / "packs")
    assert index.tensors == wanted.tensors
    assert (made / BLOB_NAME).read_bytes() == (plain / BLOB_NAME).read_bytes()
    assert made != plain
    assert "quantization_config" not in (made / "config.json").read_text()


TOWER: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "no scale": ("fp8 blocks", {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
    "half of a weight": ("awq", {"qweight": torch.zeros(8, 1, dtype=torch.int32)}),
    "an odd type": ("awq", {"weight": torch.ones(4, 4).to(torch.float8_e5m2)}),
    "nothing said": ("", {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
}


@pytest.mark.parametrize("name", TOWER)
def test_quantized_towers_may_be_damaged(name: str, tmp_path: Path) -> None:
    method, odd = TOWER[name]
    kind = replace(
        KINDS[method or "awq"],
        model=lambda: wrapper_configs()["gemma3"],
        quantizes=lambda tensor: bool(method) and "language" in tensor and "down_proj" in tensor,
        extra={f"vision_tower.vision_model.odd.{ending}": t for ending, t in odd.items()},
    )
    twin = write_checkpoint(tmp_path / "model", kind)
    if not method:
        edit_json(tmp_path / "model/config.json", lambda c: c.pop("quantization_config"))
    made, _ = _register(tmp_path / "model", tmp_path / "packs")
    plain, _ = _register(twin, tmp_path / "packs")
    assert (made / BLOB_NAME).read_bytes() == (plain / BLOB_NAME).read_bytes()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_rounded_weights_are_probed_under_the_pack_s_names(family: str, quantization: str) -> None:
    plan = plan_model(tiny_config(family), Path())
    assert probe_model(plan, quantization) <= TOLERANCE


def test_a_text_class_that_differs_is_refused_by_the_probe() -> None:
    plan = plan_model(tiny_config("llava"), Path())
    assert plan.wrapper is not None
    vision = tiny_config("cohere2_vision")
    text = class_config(from_config(vision))
    wrong = replace(plan, config=text, wrapper=replace(plan.wrapper, config=vision))
    with pytest.raises(RegistrationRefused, match="differ from transformers by"):
        probe_model(wrong)


def test_towers_may_be_absent_or_of_another_release(gemma: Path, tmp_path: Path) -> None:
    whole, _ = _register(gemma, tmp_path / "packs")

    def change(weights: dict[str, torch.Tensor]) -> None:
        towers = [name for name in weights if "language_model" not in name]
        assert towers
        assert all(weights.pop(name).isnan().all() for name in towers)
        weights["vision_tower.vision_model.extra.weight"] = torch.full((2, 2), math.nan)

    _edit_weights(gemma, change)
    without, index = _register(gemma, tmp_path / "packs")
    assert (without / BLOB_NAME).read_bytes() == (whole / BLOB_NAME).read_bytes()
    assert without != whole  # another source
    assert all("vision" not in entry.name for entry in index.tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, name: w.pop(name), "1 tensors of the model are missing"),
        (lambda w, name: w.update({name: w[name].fill_(math.nan)}), "not finite"),
        (lambda w, name: w.update({name + ".x": torch.zeros(2)}), "not in the model"),
        (lambda w, name: w.update({name: torch.zeros(3, 3)}), "has the shape"),
        (lambda w, name: w.update({name: w[name].to(torch.int8)}), "unsupported type"),
    ],
)
def test_text_tensors_are_judged_as_ever(
    gemma: Path, tmp_path: Path, change: Callable[..., object], words: str
) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        change(weights, next(name for name in weights if name.endswith("1.mlp.up_proj.weight")))

    _edit_weights(gemma, edit)
    with pytest.raises(RegistrationRefused, match=words) as caught:
        _register(gemma, tmp_path / "packs")
    assert caught.value.code in ("bad_weights", "quantized_weights")


SHAPE_7B = {
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
    **{"max_position_embeddings": 128000, "max_window_layers": 28, "sliding_window": 32768},
    **{"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    **{"rms_norm_eps": 1e-6, "use_sliding_window": False, "eos_token_id": 151645},
}
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral Small 3.1": (
        "MistralForCausalLM",
        {
            **{"model_type": "mistral3", "image_token_index": 10},
            "text_config": {
                **{"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768},
                **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
                **{"head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072},
                **{"rope_theta": 1e9, "rms_norm_eps": 1e-5, "sliding_window": None},
            },
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "head_dim": 64},
        },
    ),
    "Qwen2.5-VL 7B": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "model_type": "qwen2_5_vl",
            **SHAPE_7B,
            "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
        },
    ),
    "Qwen3-VL 30B-A3B": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {
                **{"model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "num_experts": 128},
                **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128},
                **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
                **{"vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 5e6},
                "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
            },
            "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
        },
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_published_shapes_are_judged_by_a_truncated_wrapper(name: str, tmp_path: Path) -> None:
    hosted, config = LARGE[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_model(load_config(tmp_path), tmp_path)
    assert type(plan.skeleton).__name__ == hosted
    assert probe_model(plan) <= 1e-5


def _text(**changed: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["text_config"].update(changed)


HOSTILE: dict[str, tuple[str, str, Callable[[dict[str, Any]], object]]] = {
    "no text": ("bad_config", "has no text_config", lambda c: c.pop("text_config")),
    "null": ("bad_config", "has no text_config", lambda c: c.update(text_config=None)),
    "a word": ("bad_config", "not an object", lambda c: c.update(text_config="gemma")),
    "a list": ("bad_config", "not an object", lambda c: c.update(text_config=[{}])),
    "a number": ("bad_config", "not an object", lambda c: c.update(text_config=0)),
    "two texts": (
        "bad_config",
        r"several text parts \(text_config, decoder\)",
        lambda c: c.update(decoder=c["text_config"]),
    ),
    "two, one empty": ("bad_config", "several text parts", lambda c: c.update(generator={})),
    "own code": ("custom_code", "never run", _text(auto_map={"AutoModel": "modeling_x.X"})),
    "rounded": ("quantized_weights", "unquantized", _text(quantization_config={"bits": 4})),
    "no model": ("bad_config", "not a valid", lambda c: c.update(text_config=None, decoder={})),
    "another model": (
        "unknown_family",
        "only the causal",
        lambda c: c.update(architectures=["Gemma3ForSequenceClassification"]),
    ),
    "layers": ("bad_config", "layers", _text(num_hidden_layers=MAX_LAYERS + 1, layer_types=None)),
    "tower's layers": (
        "bad_config",
        rf"layers \(vision_config.num_hidden_layers\); the maximum is {MAX_LAYERS}",
        lambda c: c["vision_config"].update(num_hidden_layers=10**7),
    ),
    "tower's stages": (
        "bad_config",
        r"layers \(vision_config.depths\)",
        lambda c: c["vision_config"].update(depths=[1] * (MAX_LAYERS + 1)),
    ),
    "shared KV": (
        "bad_config",
        "set of layer types producing a cache",
        lambda c: c.update(
            model_type="gemma4",
            architectures=["Gemma4ForConditionalGeneration"],
            text_config={"num_kv_shared_layers": 29},
            vision_config={},
        ),
    ),
    "end token": ("bad_config", "eos_token_id .* no token id", _text(eos_token_id=10**12)),
    "huge": ("bad_config", "no number that can be", _text(query_pre_attn_scalar=10**30)),
    "not a number": ("bad_config", "no number that can be", _text(rms_norm_eps=math.nan)),
    "positions": (
        "bad_config",
        "no scale of positions",
        _text(rope_scaling={"rope_type": "linear", "factor": -4.0}),
    ),
    "no words": ("bad_config", "vocabulary size", _text(vocab_size=0)),
    "no heads": ("bad_config", "not a valid gemma3", _text(num_attention_heads=0)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_configurations_that_are_refused(gemma: Path, case: str) -> None:
    code, words, edit = HOSTILE[case]
    edit_json(gemma / "config.json", edit)
    with pytest.raises(RegistrationRefused, match=words) as caught:
        inspect(gemma)
    assert caught.value.code == code


def test_older_files_name_the_text_s_fields_beside_the_rest(tmp_path: Path) -> None:
    save_folder(wrapper_configs()["qwen2_5_vl"], tmp_path, 0)
    whole = plan_model(AutoConfig.from_pretrained(tmp_path), tmp_path)

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        config.update({name: text[name] for name in text if name != "model_type"})

    edit_json(tmp_path / "config.json", flatten)
    assert "text_config" not in json.loads((tmp_path / "config.json").read_text())
    plan = inspect(tmp_path).blueprint
    assert (plan.kv_groups, plan.vocab_size) == (whole.kv_groups, whole.vocab_size)
    assert plan.tensors.keys() == whole.tensors.keys()


def test_a_wrapper_whose_tower_cannot_be_built_here_is_hosted(tmp_path: Path) -> None:
    """A tower of timm's, which is not needed; text passes ask the other towers about nothing. Files
    hold projections for layers that read the KV of others, which have none."""
    config: PretrainedConfig = tiny_config("gemma3n")
    save_folder(config, tmp_path, 0)
    config.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.layers.0.self_attn.k_proj.weight" in tensors
    for name in ("vision_tower.timm_model.x", "language_model.layers.3.self_attn.k_proj.weight"):
        tensors[f"model.{name}"] = torch.full((2, 2), math.nan)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = inspect(tmp_path)
    assert type(found.blueprint.skeleton).__name__ == "Gemma3nForCausalLM"
    assert probe_model(found.blueprint) <= TOLERANCE
    _, index = write_pack(found, tmp_path / "packs", "float32", lambda *_: None)
    assert [group.readers for group in index.kv_groups] == [((3, 2), (5, 2)), ((4, 1),)]
    assert read_index(next((tmp_path / "packs").iterdir())) == index


def test_a_tower_without_tensors_says_nothing() -> None:
    model: Any = from_config(tiny_config("gemma3"))
    tower = model.model.vision_tower
    assert not list(tower.parameters())
    assert tower(torch.zeros(1)).isnan().all()


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v4", "layers of type compressed_sparse_attention"),
    ],
)
def test_text_that_cannot_be_held_is_refused_before_anything_is_built(
    family: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: PretrainedConfig = tiny_config(family)
    monkeypatch.setattr("engine.registration.blueprint.from_config", None)
    with pytest.raises(RegistrationRefused, match=why) as caught:
        plan_model(config, Path())
    assert caught.value.code == "unknown_family"
