"""Encoder requests in the scheduler: who starts, which inputs run in a step.

Encoder requests take no memory, so they neither wait for pages nor hold rows of generating models;
at most `max_num_seqs` of one unit run at once, the others wait in order and count against
`max_waiting` like everybody. A step takes STEP_TOKENS at most, so that a request of thousands of
inputs is cut over many steps: requests of the same unit share each of them, and other units come in
between by the tags, as with generating ones. A step ends a request whose last rows it brings.

Progress survives: a request whose unit is swapped out in between waits for it and goes on where it
was (`encoder_requests.py`).
"""

from collections.abc import Sequence

from engine.policy.encoder_batching import share_inputs
from engine.request import Request
from engine.running.batch import ScheduledRow

STEP_TOKENS = 512
"""Beyond this a step gains nothing on a CPU, where what layers put out no longer stays in its
caches, and everybody else waits longer for a turn. Texts of 6 to 40 tokens, a MiniLM's shape, one
quiet core: 2,891 tokens/s with 256, 3,070 with 512, 2,588 with 1024, 2,216 with 2048."""


def encoder_rows(running: Sequence[Request], max_tokens: int) -> list[ScheduledRow]:
    """The next step's inputs, oldest request first; empty where all have been launched."""
    pending = [r for r in running if r.encoding is not None and r.num_computed < r.num_prompt]
    progress = [(r.encoding.ends, r.num_computed) for r in pending if r.encoding is not None]
    granted = share_inputs(progress, min(max_tokens, STEP_TOKENS))
    return [
        ScheduledRow(request, tokens)
        for request, tokens in zip(pending, granted, strict=True)
        if tokens
    ]


def row_context(row: ScheduledRow) -> float:
    """Positions that each of the row's tokens attends to, for the split of a step's time."""
    encoding = row.request.encoding
    return row.end if encoding is None else encoding.mean_length(row.first, row.end)
