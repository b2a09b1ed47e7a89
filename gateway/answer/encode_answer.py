"""Answers of encoders as JSON: vectors, classes, ranks. Part of stage 9.

Comes in: the worker's rows, [inputs, width] float32, all finite. Goes out: the body in parts, which
nobody needs to join. The arithmetic on rows that clients see and models do not is here: vectors cut
and made unit again, logits to probabilities.

A large answer is millions of digits, a tenth of a second of work: it is written some rows at a time
and others get a turn between.
"""

import asyncio
import base64
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.prepare.encode_prepare import EncodePrepared
from gateway.prepare.encode_wire import EncodeAsk

Rows = NDArray[np.float32]

_TURN_NUMBERS = 8_192
"""Numbers written in one go: about 2 ms."""
_encode = msgspec.json.Encoder().encode


async def answer(prepared: EncodePrepared, rows: Rows) -> list[bytes]:
    """The whole answer, in parts."""
    request, asked = prepared.request, prepared.asked
    num_tokens = len(request.prompt_token_ids)
    head: dict[str, Any] = {
        "id": request.request_id,
        "object": "list",
        "created": request.created_at,
        "model": request.model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    name = "results" if asked.kind == "rerank" else "data"
    if asked.kind == "embedding":
        items = _embeddings(asked, rows)
    elif asked.kind == "classify":
        items = _classes(prepared, rows)
    else:
        items = _ranks(asked, rows)
    parts = [_encode(head)[:-1] + b"," + _encode(name) + b":["]
    left = iter(items)
    while turn := list(islice(left, max(1, _TURN_NUMBERS // rows.shape[1]))):
        comma = b"," if len(parts) > 1 else b""
        parts.append(comma + _encode(turn)[1:-1])
        await asyncio.sleep(0)
    return [*parts, b"]}"]


def probabilities(logits: Rows, multi_label: bool) -> NDArray[np.float64]:
    """A classifier's logits, [inputs, classes], as probabilities: of each class for itself where
    they do not exclude one another, or where there is only one; else together 1."""
    values = logits.astype(np.float64)
    if multi_label or values.shape[1] == 1:
        # By whichever form does not overflow.
        small = np.exp(-np.abs(values))
        return np.where(values >= 0, 1 / (1 + small), small / (1 + small))
    powers: NDArray[np.float64] = np.exp(values - values.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def shortened(rows: Rows, dimensions: int | None) -> Rows:
    """Vectors cut to their first numbers and made of length 1 again. Nulls stay nulls."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    cut = rows[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def _embeddings(asked: EncodeAsk, rows: Rows) -> Iterable[dict[str, Any]]:
    write: Callable[[Rows], Any] = np.ndarray.tolist
    if asked.encoding_format == "base64":
        write = _base64
    for index, row in enumerate(shortened(rows, asked.dimensions)):
        yield {"object": "embedding", "index": index, "embedding": write(row)}


def _base64(row: Rows) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _classes(prepared: EncodePrepared, rows: Rows) -> Iterable[dict[str, Any]]:
    model = prepared.request.model
    for index, row in enumerate(probabilities(rows, model.multi_label)):
        yield {
            "index": index,
            "label": model.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(model.labels),
        }


def _ranks(asked: EncodeAsk, rows: Rows) -> Iterable[dict[str, Any]]:
    """The most relevant first; of equals the one that came first."""
    scores = probabilities(rows, False)[:, 0]
    # By logits: far out they still differ where probabilities are 1 or 0 alike.
    order: Sequence[int] = np.argsort(-rows[:, 0], kind="stable").tolist()
    for index in order[: asked.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if asked.return_documents:
            result["document"] = {"text": asked.inputs[index]}
        yield result
