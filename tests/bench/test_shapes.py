"""True-shape folders: every reader agrees on config, weights and tokenizer; nothing ever ends."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import shapes
from bench.prompts import PromptMaker
from engine.registration.source import weight_files
from engine.registration.tensors.files import SourceTensors

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 900,
    "max_position_embeddings": 256,
    "norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"architecture": "LlamaForCausalLM", "tie_word_embeddings": False},
    "qwen2": SMALL | {"architecture": "Qwen2ForCausalLM"},
    "qwen3": SMALL | {"architecture": "Qwen3ForCausalLM"},
    "mistral": SMALL | {"architecture": "MistralForCausalLM", "sliding_window": 16},
    "phi3": SMALL | {"architecture": "Phi3ForCausalLM"},
    "gemma2": SMALL
    | {"architecture": "Gemma2ForCausalLM", "hidden_act": "gelu_pytorch_tanh"}
    | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 50.0, "sliding_window": 16},
    "gpt2": SMALL | {"architecture": "GPT2LMHeadModel", "hidden_act": "gelu_new"},
    "opt": SMALL
    | {"architecture": "OPTForCausalLM", "hidden_act": "relu", "do_layer_norm_before": True},
    "gpt_neox": SMALL
    | {"architecture": "GPTNeoXForCausalLM", "hidden_act": "gelu", "rotary_pct": 0.25}
    | {"parallel_residual": True, "tie_word_embeddings": False},
}
for family, small_shape in SHAPES.items():
    small_shape["model_type"] = family


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_loads_runs_and_never_ends(name: str, tmp_path: Path) -> None:
    built = shapes.build(SHAPES, name, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None
    assert built.num_params == sum(parameter.numel() for parameter in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token is None
    messages = [{"role": "user", "content": PromptMaker(tmp_path).prompt(12, "s", 0)}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids = torch.tensor([prompt["input_ids"]])
    generated = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert generated.shape[1] == ids.shape[1] + 40
    logits = model(ids).logits[0, -1].float().detach()
    assert 0.5 < float(logits.std()) < 8.0


@pytest.mark.parametrize("name", ["qwen2", "phi3", "llama", "gemma2"])
def test_transformers_and_tokenizers_read_one_tokenizer(name: str, tmp_path: Path) -> None:
    shapes.build(SHAPES, name, tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hello, one 22 babe  gobo!"}]
    text = auto.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    ids = plain.encode(text, add_special_tokens=False).ids
    assert auto(text)["input_ids"] == ids
    assert plain.decode(ids, skip_special_tokens=True) == text
    assert auto.decode(ids, skip_special_tokens=True) == text


def test_every_id_is_text_of_its_own(tmp_path: Path) -> None:
    shapes.build(SHAPES, "qwen2", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 900
    texts = [tokenizer.decode([index], skip_special_tokens=True) for index in range(900)]
    assert len(set(texts)) == 900
    assert all(text and text.isascii() for text in texts)
    assert all(text.isprintable() for text in texts if text != "\n")
    stream = DecodeStream([], skip_special_tokens=True)
    assert "".join(stream.step(tokenizer, index) or "" for index in range(900)) == "".join(texts)


def test_vocabulary_words_read_back_as_themselves() -> None:
    vocab, merges = shapes.vocabulary(20_000)
    assert sorted(vocab.values()) == list(range(20_000))
    assert len(set(merges)) == len(merges)
    assert vocab[shapes.SPACE + "bababa"] < vocab[shapes.SPACE + "bababe"]
    with pytest.raises(ValueError, match="at least"):
        shapes.vocabulary(100)


def test_prompts_have_their_length_and_differ(tmp_path: Path) -> None:
    shapes.build(SHAPES, "qwen2", tmp_path)
    maker = PromptMaker(tmp_path)
    texts = [maker.prompt(50, "seed", index) for index in range(20)]
    assert len(set(texts)) == 20
    assert all(maker.count(text) == 50 for text in texts)
    assert maker.prompt(50, "seed", 3) == texts[3]
    assert maker.prompt(50, "other", 3) != texts[3]


def test_the_same_seed_gives_the_same_bytes_in_one_file_or_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: Path, seed: int) -> str:
        shapes.build(SHAPES, "llama", folder, seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        values = [tensor.view(torch.uint8).numpy().tobytes() for tensor in model.parameters()]
        return hashlib.sha256(b"".join(values)).hexdigest()

    first = digest(tmp_path / "a", 1)
    assert digest(tmp_path / "b", 2) != first
    monkeypatch.setattr(shapes, "MAX_SHARD_BYTES", 50_000)
    assert digest(tmp_path / "c", 1) == first
    assert len(list((tmp_path / "c").glob("model-*-of-*.safetensors"))) > 2


def test_the_shipped_shapes_have_their_published_size() -> None:
    known = shapes.read_shapes()
    assert shapes.nearest_shape(known, 10**9) == "Qwen/Qwen2.5-0.5B"
    for name, shape in known.items():
        assert shape["params_matmul_approx"] == pytest.approx(shape["published_params"], rel=0.01)
        assert shapes.config_kwargs(shape)["eos_token_id"] is None, name


def test_holes_are_a_checkpoint_of_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MAX_SHARD_BYTES", 50_000)
    built = shapes.build(SHAPES, "llama", tmp_path, seed=None)
    files = weight_files(built.folder)
    assert len(files) > 1
    with SourceTensors(files) as source:
        tensors = {name: source.read(name) for name in source.shapes}
    assert sum(tensor.nbytes for tensor in tensors.values()) == built.weight_bytes
    assert not any(bool(tensor.any()) for tensor in tensors.values())
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
