"""What the library's modules do wrong in our batches, repaired."""

import pytest
import torch

from engine.modules.transformers_backend import bind_weights, build_skeleton
from engine.registration.parity import draw_weights
from tests.engine.tiny_models import VOCAB
from tests.engine.unusual_models import shared_configs


def test_an_id_without_a_row_of_its_own_has_that_of_id_0() -> None:
    config = shared_configs()["gemma3n"]
    config.vocab_size_per_layer_input = VOCAB - 6
    eager = build_skeleton(config, torch.float32, "eager")
    ours = build_skeleton(config, torch.float32)
    weights = draw_weights(eager, 0)
    ids = torch.tensor([[3, VOCAB - 1, VOCAB - 6, VOCAB - 7]])
    tables = []
    for model in (eager, ours):
        bind_weights(model, weights)
        tables.append(model.get_submodule("model.embed_tokens_per_layer"))
    wanted = tables[0](torch.where(ids < VOCAB - 6, ids, 0))
    assert torch.equal(tables[1](ids), wanted)
    with pytest.raises(IndexError):
        tables[0](ids)
