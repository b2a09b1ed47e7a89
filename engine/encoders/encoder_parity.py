"""The encoders' parity probe: do an architecture's rows come out of a ragged batch as they should?

A truncated model of the same configuration class, random weights, inputs of unlike lengths with
padding tokens and both segments among them: once all in one flat batch, as the engine runs them,
and once each alone through transformers' own model with eager attention. Windows are cut so that
the inputs pass them.
"""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.encoders.encoder_batch import build_encoder_batch
from engine.encoders.encoder_families import FAMILIES, longest_input
from engine.encoders.encoder_model import EncoderModel, build_encoder, pooled
from engine.encoders.encoder_requests import Encoding
from engine.errors import RegistrationRefused
from engine.packs.blueprint import Blueprint
from engine.packs.pack import EncoderRecord, Task
from engine.protocol import EncodeInputs, SamplingParams, Submit
from engine.registration.parity import draw_weights
from engine.request import Request
from engine.running.batch import ScheduledRow
from engine.running.transformers_backend import bind_weights

TOLERANCE = 1e-4
PROBE_LENGTHS = (23, 1, 9, 14, 9, 2)
WINDOW = 8
VOCAB = 128


def probe_encoder(plan: Blueprint) -> float:
    """Largest absolute difference of the rows.

    Raises RegistrationRefused("parity") where it passes TOLERANCE or the model cannot run.
    """
    assert plan.encoder is not None
    what = f"a {type(plan.skeleton).__name__}"
    try:
        error = _largest_error(_truncated(plan.config), plan.task, plan.encoder)
    except Exception as problem:  # modelling code: no contract on its error types
        raise RegistrationRefused(
            "parity",
            f"{what} does not run over ragged batches ({type(problem).__name__}: {problem}); it "
            "cannot be hosted by this version",
        ) from problem
    if not error <= TOLERANCE:
        raise RegistrationRefused(
            "parity",
            f"{what} differs from transformers by {error:.1g} in its rows (allowed "
            f"{TOLERANCE:.0g}); it cannot be hosted by this version",
        )
    return error


def _truncated(config: Any) -> Any:
    """The same class and options: a layer of each kind, at least two, few words, short windows."""
    small = copy.deepcopy(config)
    layers = min(2, config.num_hidden_layers)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    small.num_hidden_layers = layers = max(layers, len(kinds))
    if kinds:
        small.layer_types = (kinds * layers)[:layers]
        small.local_attention = min(WINDOW, config.local_attention)
    small.vocab_size = min(VOCAB, config.vocab_size)
    small.pad_token_id = 0
    if FAMILIES[config.model_type].positions_from_pad:
        small.pad_token_id = 1
        small.max_position_embeddings = longest_input(config) + 2
    return small


@torch.inference_mode()
def _largest_error(config: Any, task: Task, record: EncoderRecord) -> float:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int, high: int) -> list[int]:
        return torch.randint(0, high, (length,), generator=generator).tolist()

    lengths = [min(length, longest_input(config)) for length in PROBE_LENGTHS]
    inputs = [draw(length, config.vocab_size) for length in lengths]
    types = [draw(length, record.segments) if record.segments > 1 else [] for length in lengths]
    eager = build_encoder(copy.deepcopy(config), task, torch.float32, "eager")
    weights = draw_weights(eager, 0)
    bind_weights(eager, weights)
    expected = [_alone(eager, ids, kinds, record) for ids, kinds in zip(inputs, types, strict=True)]
    model = EncoderModel(copy.deepcopy(config), task, record, torch.float32)
    model.bind(weights)
    submit = Submit(
        request_id="probe",
        attempt=1,
        tenant_id="probe",
        model_id="probe",
        prompt_token_ids=list(chain.from_iterable(inputs)),
        max_tokens=0,
        sampling=SamplingParams(),
        stop_token_ids=[],
        encode=EncodeInputs(lengths, list(chain.from_iterable(types))),
    )
    request = Request.of(submit, 0.0)
    request.encoding = Encoding.of(submit, record)
    batch = build_encoder_batch([ScheduledRow(request, request.num_prompt)], torch.device("cpu"))
    got = model.rows(batch)[torch.from_numpy(batch.places[0])]
    wanted = torch.stack(expected)[torch.from_numpy(request.encoding.order)]
    difference = (got - wanted).abs().max().item()
    return difference if difference == difference else float("inf")


def _alone(
    eager: nn.Module, ids: Sequence[int], types: Sequence[int], record: EncoderRecord
) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
    if types:
        inputs["token_type_ids"] = torch.tensor([types])
    output = eager(**inputs)
    if hasattr(output, "logits"):
        logits: torch.Tensor = output.logits[0]
        return logits
    row = pooled(output.last_hidden_state[0], [(1, len(ids))], record.pooling)[0]
    return functional.normalize(row, dim=-1) if record.normalize else row
