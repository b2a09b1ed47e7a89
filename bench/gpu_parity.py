"""Greedy tokens of twelve families, most in bf16: the engine beside transformers on one GPU.

Small models with random weights whose answers do not repeat themselves. In bf16 two ways of the
same arithmetic may choose differently where the two best logits are closer than their rounding:
such a token is a tie and is counted. Anything else is wrong, and a goal missed. Packs in fp8 stand
beside the weights that they keep, in float32; rows are rounded, too, so that ties are wider.
"""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.gpu_rig import Settings, rig
from engine.pack import PackIndex, schemes_in
from engine.registration import convert
from engine.registration.quantize import dequantize, quantize_rows

VOCAB = 512
NEW_TOKENS = 24
TIE = 0.03
"""A margin of the two best logits, as a share of the largest: eight steps of bf16."""
TIE_FP8 = 0.3
"""The same of fp8: emulated on a processor, 0.12 is the most of 864 tokens; chance is near 1."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gemma": {},
    "gemma3_text": {
        "sliding_window": 40,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
BY_MODULES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 32},
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40},
}
"""Families that share less with the fused layers: other norms, soft caps, sinks, experts."""

IN_FP8: dict[str, dict[str, Any]] = {"llama fp8": {}, "qwen2 fp8": {}}


def parity(settings: Settings) -> dict[str, Any]:
    """Families, tokens compared, ties, wrong ones."""
    device = "cpu" if settings.dry else torch.device("cuda", 0)
    found: dict[str, Any] = {}
    packs: dict[str, Path] = {}
    references: dict[str, Any] = {}
    for seed, (family, options) in enumerate((FAMILIES | BY_MODULES | IN_FP8).items()):
        folder = settings.work_dir / f"parity-{family}".replace(" ", "-")
        reference = _model(family.partition(" ")[0], options, folder, seed)
        dtype: convert.DtypeChoice = "fp8" if family in IN_FP8 else "auto"
        packs[family], index = convert.write_pack(
            convert.inspect(folder), settings.work_dir / "parity-packs", dtype, lambda *_: None
        )
        references[family] = (_kept(reference, index) if index.quantization else reference).to(
            device
        )
    rng = random.Random(7)
    count = settings.scaled(16, 2)
    longest = settings.scaled(200, 40)
    with rig(settings) as made:
        made.host(packs)
        for family in packs:
            made.load(family)
        asks = {}
        for family in packs:
            # In fp8 more decode than products multiply by the weights alone.
            for _ in range(count + (8 if family in IN_FP8 else 0)):
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
                asks[made.submit(family, prompt, NEW_TOKENS)] = (family, prompt)
        said = made.run_out(list(asks))
        for family in packs:  # one row has kernels of its own
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
            name = made.submit(family, prompt, NEW_TOKENS)
            asks[name] = (family, prompt)
            said |= made.run_out([name])
        for family in packs:
            runner: Any = made.engine.runner(made.engine._manager.catalog.instance_of(family))
            found[family] = {"fused": runner.fused is not None, "same": 0, "ties": 0, "wrong": 0}
    for name, (family, prompt) in asks.items():
        tie = TIE_FP8 if family in IN_FP8 else TIE
        for key, value in compare(references[family], prompt, said[name], tie).items():
            found[family][key] += value
    wrong = sum(row["wrong"] for row in found.values())
    found["goals"] = {"wrong tokens": {"reached": wrong, "wanted": 0, "met": wrong == 0}}
    return found


def compare(reference: Any, prompt: list[int], said: list[int], tie: float = TIE) -> dict[str, int]:
    """One answer: tokens that are the reference's, and whether it then ends in a tie."""
    device = next(reference.parameters()).device
    ids = torch.tensor([prompt + said], device=device)
    with torch.inference_mode():
        logits = reference(input_ids=ids, use_cache=False).logits[0].float()
    counts = {"same": 0, "ties": 0, "wrong": 0}
    for place, token in enumerate(said, start=len(prompt) - 1):
        top = logits[place].topk(2)
        if token == int(top.indices[0]):
            counts["same"] += 1
            continue
        # The reference is given our own tokens, so it can be asked about each: how far below?
        below = float(top.values[0] - logits[place, token])
        close = below <= tie * float(logits[place].abs().max())
        counts["ties" if close else "wrong"] += 1
        if not close:
            break
    return counts


def _kept(reference: Any, index: PackIndex) -> Any:
    """The model with the weights that an fp8 pack stands for, in float32."""
    schemes = schemes_in(index)
    reference = reference.float()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in schemes:
                rounded = quantize_rows(parameter, torch.float32, schemes[name])
                parameter.copy_(dequantize(*rounded))
    return reference


def _model(family: str, options: dict[str, Any], folder: Path, seed: int) -> Any:
    config = CONFIG_MAPPING[family](**SIZES, **options)
    torch.manual_seed(seed)
    # Which experts a token has is a step: rounding to bf16 would now and then choose others.
    dtype = torch.float32 if "num_experts_per_tok" in options else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}', encoding="utf-8")
    return model
