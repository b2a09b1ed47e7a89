"""Tiny encoders with random weights of all six families, as folders and as packs.

Each with transformers' own model for reference, asked about one input at a time. Weights are drawn
wider than the library does it, so that inputs are told apart and attention is not level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from engine.encoding import Rows
from engine.protocol import EncodeInputs, ModelSpec, SamplingParams, Submit
from engine.registration.convert import inspect, write_pack

VOCAB = 96
POSITIONS = 48
LABELS = {0: "no", 1: "yes", 2: "perhaps"}
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class TinyEncoder:
    """A folder, its pack, and transformers' own model."""

    name: str
    folder: Path
    pack_dir: Path
    reference: Any
    normalizes: bool = True

    @property
    def spec(self) -> ModelSpec:
        """As a worker's catalog names it."""
        return ModelSpec(self.name, str(self.pack_dir))

    def row(self, ids: Sequence[int], types: Sequence[int] = ()) -> torch.Tensor:
        """By transformers, alone."""
        inputs = {"input_ids": torch.tensor([list(ids)])}
        if types:
            inputs["token_type_ids"] = torch.tensor([list(types)])
        with torch.inference_mode():
            output = self.reference(**inputs)
        if hasattr(output, "logits"):
            logits: torch.Tensor = output.logits[0]
            return logits
        mean: torch.Tensor = output.last_hidden_state[0].mean(0)
        return functional.normalize(mean, dim=-1) if self.normalizes else mean

    def check(
        self, inputs: Sequence[Sequence[int]], vectors: bytes, types: Sequence[Sequence[int]] = ()
    ) -> None:
        """`vectors` are the reference's rows of `inputs`, within TOLERANCE."""
        segments = types or [()] * len(inputs)
        expected = torch.stack(
            [self.row(ids, kinds) for ids, kinds in zip(inputs, segments, strict=True)]
        )
        got = torch.from_numpy(rows_of(vectors, len(inputs)))
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def rows_of(vectors: bytes, num_inputs: int) -> Rows:
    """As a gateway reads them."""
    return np.frombuffer(vectors, dtype="<f4").reshape(num_inputs, -1).copy()


def family_configs(**more: Any) -> dict[str, PretrainedConfig]:
    """One small configuration a family; MiniLM is a bert with narrow heads."""
    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
        **more,
    }
    fairseq = common | {"pad_token_id": 1, "max_position_embeddings": POSITIONS + 2}
    narrow = common | {"hidden_size": 24, "num_attention_heads": 12, "num_hidden_layers": 3}
    return {
        "bert": BertConfig(**common),
        "minilm": BertConfig(**narrow),
        "roberta": RobertaConfig(type_vocab_size=1, **fairseq),
        "xlm-roberta": XLMRobertaConfig(type_vocab_size=1, **fairseq),
        "distilbert": DistilBertConfig(
            vocab_size=VOCAB,
            max_position_embeddings=POSITIONS,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
            **more,
        ),
        # Windows far below the longest input: half of 8 to either side.
        "modernbert": ModernBertConfig(
            local_attention=8, global_attn_every_n_layers=2, cls_token_id=2, **common
        ),
    }


def classifier_configs(num_labels: int = 3, **more: Any) -> dict[str, PretrainedConfig]:
    """The same families with a head; modernbert's looks at the mean."""
    labels = {number: LABELS.get(number, str(number)) for number in range(num_labels)}
    configs = family_configs(id2label=labels, label2id={v: k for k, v in labels.items()}, **more)
    configs["modernbert"].classifier_pooling = "mean"
    return configs


def save_encoder(config: PretrainedConfig, folder: Path, seed: int, classify: bool = False) -> Any:
    """A folder with a tokenizer; the model it was saved from."""
    torch.manual_seed(seed)
    kind: Any = AutoModelForSequenceClassification if classify else AutoModel
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """One of numbers."""
    vocab = {f"t{number}": number for number in range(VOCAB)}
    Tokenizer(WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))


def make_encoders(
    root: Path, configs: dict[str, PretrainedConfig], classify: bool = False
) -> dict[str, TinyEncoder]:
    """These configurations as folders and packs below `root`."""
    made = {}
    for seed, (name, config) in enumerate(configs.items()):
        folder = root / "source" / name
        reference = save_encoder(config, folder, seed, classify)
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "float32", lambda *_: None)
        made[name] = TinyEncoder(name, folder, pack_dir, reference)
    return made


def random_inputs(
    seed: int, num_inputs: int, longest: int = POSITIONS, low: int = 2
) -> list[list[int]]:
    """Of all lengths from 1, ids from `low`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_inputs,), generator=generator).tolist()
    return [
        torch.randint(low, VOCAB, (length,), generator=generator).tolist() for length in lengths
    ]


def encode_submit(
    request_id: str,
    model_id: str,
    inputs: Sequence[Sequence[int]],
    types: Sequence[Sequence[int]] = (),
    tenant: str = "t",
    timeout_s: float = 0.0,
    states: bool = False,
) -> Submit:
    """As a gateway sends it."""
    return Submit(
        request_id,
        1,
        tenant,
        model_id,
        [token for ids in inputs for token in ids],
        0,
        SamplingParams(),
        [],
        timeout_s=timeout_s,
        encode=EncodeInputs(
            [len(ids) for ids in inputs], [kind for kinds in types for kind in kinds], states
        ),
    )
