"""One step's inputs of one encoder as flat tensors.

Comes in: scheduled rows (a request and how many of its uncomputed tokens run now, whole inputs).
Goes out: `EncoderBatch`, all that an encoder runner needs: the inputs of all rows end to end in one
sequence of T tokens, those of one length side by side, nothing padded. It holds nothing that
changes later. And the way back: `split_rows` gives each scheduled row the results of its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.encoding import Encoding, Ids, Rows
from engine.running import ScheduledRow


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """All of a step.

    input_ids   int64 [1, T]
    type_ids    the same; None: all zero
    groups      (how many inputs, tokens of each), in their order
    places      for each row, where its inputs have come to lie among all, and behind them its
                tokens, where these have rows too: there they lie behind all inputs
    has_states  tokens have rows
    """

    rows: tuple[ScheduledRow, ...]
    input_ids: torch.Tensor
    type_ids: torch.Tensor | None
    groups: tuple[tuple[int, int], ...]
    places: tuple[Ids, ...]
    has_states: bool


def build_encoder_batch(rows: Sequence[ScheduledRow], device: torch.device) -> EncoderBatch:
    """Lay the inputs out."""
    picked = [(_encoding(row), _encoding(row).inputs(row.first, row.end)) for row in rows]
    lengths = np.concatenate([encoding.lengths[inputs] for encoding, inputs in picked])
    order = np.argsort(lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    sorted_lengths = lengths[order]
    ends = np.cumsum(sorted_lengths)
    # Where each token of the step lies when the rows' tokens lie end to end.
    sources = np.repeat(starts[order] - (ends - sorted_lengths), sorted_lengths)
    sources += np.arange(len(sources))
    ids = np.concatenate([_encoding(row).token_ids[row.first : row.end] for row in rows])
    type_ids = None
    if any(encoding.type_ids is not None for encoding, _ in picked):
        type_ids = np.concatenate([_types(row) for row in rows])[sources]
    different, counts = np.unique(sorted_lengths, return_counts=True)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    bounds = np.cumsum([inputs.stop - inputs.start for _, inputs in picked])
    token_place = np.empty_like(sources)
    token_place[sources] = np.arange(len(sources)) + len(order)
    token_bounds = np.cumsum([row.num_scheduled_tokens for row in rows])
    tokens = np.split(token_place, token_bounds[:-1])
    places = [
        inputs if encoding.places is None else np.concatenate((inputs, own))
        for inputs, own, (encoding, _) in zip(
            np.split(place, bounds[:-1]), tokens, picked, strict=True
        )
    ]
    return EncoderBatch(
        rows=tuple(rows),
        input_ids=torch.from_numpy(ids[sources])[None].to(device),
        type_ids=None if type_ids is None else torch.from_numpy(type_ids)[None].to(device),
        groups=tuple(zip(counts.tolist(), different.tolist(), strict=True)),
        places=tuple(places),
        has_states=any(encoding.places is not None for encoding, _ in picked),
    )


def split_rows(batch: EncoderBatch, rows: torch.Tensor) -> tuple[Rows, ...]:
    """[inputs (+ tokens), dim] of the step -> for each scheduled row, those of its inputs, and of
    its tokens where they have any, in its order."""
    host = rows.cpu().numpy()
    return tuple(host[places] for places in batch.places)


def _encoding(row: ScheduledRow) -> Encoding:
    encoding = row.request.encoding
    assert encoding is not None
    return encoding


def _types(row: ScheduledRow) -> Ids:
    types = _encoding(row).type_ids
    return (
        np.zeros(row.num_scheduled_tokens, dtype=np.int64)
        if types is None
        else types[row.first : row.end]
    )
