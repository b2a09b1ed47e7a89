"""An application with encoders beside the generating model: a BERT-like tokenizer, and a worker
that answers with rows anybody can work out from an input's tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from gateway.pricing.policy.pricing import PriceBook, Prices
from gateway.types import HostedModel, PreparedRequest
from tests.gateway.edge_kit import PLENTY, Kit, Running, key_record, make_kit

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", "to", "far", "old", "moon", "red"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
MAX_CONTEXT = 16
DIM = 4


def bert_like_tokenizer() -> Tokenizer:
    """Word pieces in lower case, `[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]` with segments."""
    pieces = [*SPECIAL, *WORDS, *(f"##{letter}" for letter in "abcdefghij")]
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_encoder(folder: Path, **config: Any) -> Tokenizer:
    """The files of a pack that the gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = bert_like_tokenizer()
    # What saved tokenizers often carry; nobody asked for it here.
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encoder_models(folder: Path) -> list[HostedModel]:
    """`embed`, `classes` (three that exclude one another), `tags` (two that do not), `cross`."""
    base = HostedModel(
        name="embed",
        revision="rev-embed-0123456789",
        pack_dir=str(folder),
        max_context=MAX_CONTEXT,
        vocab_size=len(SPECIAL) + len(WORDS) + 10,
        created_at=1_700_000_000,
        task="embed",
        dim=DIM,
    )
    labels = {"classes": ("no", "maybe", "yes"), "tags": ("loud", "old"), "cross": ("LABEL_0",)}
    classifiers = [
        replace(
            base,
            name=name,
            revision=f"rev-{name}-0123456789",
            task="classify",
            dim=0,
            labels=names,
            multi_label=name == "tags",
        )
        for name, names in labels.items()
    ]
    return [base, *classifiers]


def rows_of(request: PreparedRequest) -> np.ndarray[Any, Any]:
    """What the worker says: for each input its tokens' sum, by powers of its length."""
    assert request.encode is not None
    model = request.model
    width = model.dim if model.task == "embed" else len(model.labels)
    rows, at = [], 0
    for length in request.encode.lengths:
        ids = request.prompt_token_ids[at : at + length]
        at += length
        rows.append([sum(ids) / length**power / 10 for power in range(width)])
    return np.array(rows, dtype=np.float32)


def answering(running: Running) -> None:
    """A worker that answers encoders at once."""
    running.answer(rows_of(running.request))


def make_encoder_kit(folder: Path, **settings: Any) -> Kit:
    """`make_kit` with the encoders in its catalog."""
    kit = make_kit(folder / "tiny", **settings)
    write_encoder(folder / "encoder")
    models = encoder_models(folder / "encoder")
    prices = {model.name: [(0.0, Prices(prompt_nanos=4, embedding_nanos=3))] for model in models}
    kit.directory.replace(2, [key_record()], [kit.model, *models], PLENTY, PriceBook(prices))
    kit.dispatcher.script = answering
    return kit
