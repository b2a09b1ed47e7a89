"""An encoder request inside the engine: its inputs, which of them have been computed, their rows.

Comes in: a Submit with `encode`. Its inputs are put in the order of their lengths, so that those
of one length lie together in a step (`kernels/ragged_attention.py`) and a step's inputs are alike.
In that order they are computed, and progress is a number of tokens, always at an input's end: the
scheduler's `Request.num_computed` says how far steps have been launched, `num_known` how many rows
have come back. An encoder has no KV: rows that are known stay known when its model is swapped out
in between, and only the rest is computed when it is back.

`check_encode` is the gate: what passes it cannot make a step fail, whatever a peer has sent. Does
not know the model's modules (`encoder_model.py`) or who goes when (`scheduler.py`).
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from engine.errors import RequestRefused
from engine.pack import EncoderRecord, PackIndex
from engine.protocol import MAX_ENCODE_INPUTS, EncodeInputs, Submit

Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(slots=True, eq=False)
class Encoding:
    """The inputs of one request, shortest first, and their rows as far as they are known.

    order      the number of each input in the request
    lengths    tokens of each
    ends       tokens up to and with each
    token_ids  of all inputs in this order, end to end
    type_ids   alike; None: all zero
    rows       float32 [inputs, dim], in the order of the request; with `places` [inputs + tokens,
               dim], the tokens' own behind
    places     where each token, in this order, lies in the request; None: tokens have no rows
    num_known  inputs whose row is there
    """

    order: Ids
    lengths: Ids
    ends: list[int]
    token_ids: Ids
    type_ids: Ids | None
    rows: Rows = field(repr=False)
    places: Ids | None = None
    num_known: int = 0

    @classmethod
    def of(cls, submit: Submit, record: EncoderRecord) -> "Encoding":
        """Of a Submit that `check_encode` has passed."""
        assert submit.encode is not None
        given = np.array(submit.encode.lengths, dtype=np.int64)
        order = np.argsort(given, kind="stable")
        lengths = given[order]
        ends = np.cumsum(lengths)
        starts = np.cumsum(given) - given
        # Where each token, in the new order, lies in the request.
        places = np.repeat(starts[order] - (ends - lengths), lengths) + np.arange(ends[-1])
        num_rows = len(given) + (len(places) if submit.encode.states else 0)
        types = submit.encode.type_ids if record.segments > 1 else []
        return cls(
            order=order,
            lengths=lengths,
            ends=ends.tolist(),
            token_ids=np.array(submit.prompt_token_ids, dtype=np.int64)[places],
            type_ids=np.array(types, dtype=np.int64)[places] if types else None,
            rows=np.empty((num_rows, record.dim), dtype=np.float32),
            places=places if submit.encode.states else None,
        )

    def inputs(self, first: int, end: int) -> slice:
        """The inputs that the tokens `first` to `end` are, both at the beginning of one."""
        return slice(bisect_right(self.ends, first), bisect_right(self.ends, end))

    def mean_length(self, first: int, end: int) -> float:
        """Of these inputs, as a token sees it: what each of them attends over."""
        lengths = self.lengths[self.inputs(first, end)]
        return float((lengths * lengths).sum() / (end - first))

    def take(self, first: int, end: int, rows: Rows) -> None:
        """The rows of these inputs, and of their tokens where they have any, in this order, are
        known. Each is given once."""
        given = self.order[self.inputs(first, end)]
        self.rows[given] = rows[: len(given)]
        if self.places is not None:
            self.rows[len(self.order) + self.places[first:end]] = rows[len(given) :]
        self.num_known += len(given)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are known."""
        return self.num_known == len(self.order)

    def vectors(self) -> bytes:
        """All rows as the protocol sends them."""
        return self.rows.astype("<f4", copy=False).tobytes()


def check_encode(submit: Submit, index: PackIndex) -> None:
    """Raises RequestRefused for what this model cannot be asked; changes nothing."""
    encode, record = submit.encode, index.encoder
    if encode is None or record is None:
        what = "generates text" if record is None else f"does not generate text ({index.task})"
        raise _wrong(f"model {submit.model_id!r} {what}")
    text = submit.max_tokens or submit.stop_token_ids or submit.generated
    if text or submit.constraint is not None:
        raise _wrong("encoders generate no text: max_tokens must be 0")
    if max(submit.logprobs, submit.prompt_logprobs) >= 0:
        raise _wrong("encoders have no logprobs")
    if encode.states and (index.task != "embed" or "+" in record.pooling):
        raise _wrong("its tokens have no rows as wide as its inputs'")
    _check_shape(submit, encode)
    longest = max(encode.lengths)
    if longest > index.max_context:
        raise RequestRefused(
            "context_length_exceeded",
            f"an input has {longest} tokens, more than the maximum context length of "
            f"{index.max_context}",
        )
    ids = submit.prompt_token_ids
    if min(ids) < 0 or max(ids) >= index.vocab_size:
        raise RequestRefused(
            "context_length_exceeded",
            f"a token id is not between 0 and {index.vocab_size - 1}",
        )
    types = encode.type_ids
    if types and record.segments > 1 and not 0 <= min(types) <= max(types) < record.segments:
        raise _wrong(f"a type id is not between 0 and {record.segments - 1}")


def _check_shape(submit: Submit, encode: EncodeInputs) -> None:
    num_tokens = len(submit.prompt_token_ids)
    if not 1 <= len(encode.lengths) <= MAX_ENCODE_INPUTS:
        raise _wrong(f"{len(encode.lengths)} inputs: 1 to {MAX_ENCODE_INPUTS} are allowed")
    if min(encode.lengths) < 1 or sum(encode.lengths) != num_tokens:
        raise _wrong(f"the inputs' lengths do not add up to the {num_tokens} tokens sent")
    if encode.type_ids and len(encode.type_ids) != num_tokens:
        raise _wrong(f"{len(encode.type_ids)} type ids for {num_tokens} tokens")


def _wrong(message: str) -> RequestRefused:
    return RequestRefused("wrong_task", message)
