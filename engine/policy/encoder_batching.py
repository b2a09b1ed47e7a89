"""Which inputs of which encoder requests are computed in the next step. Pure.

Inputs are computed whole. The oldest request always gets its next input, so that everybody gets
on; what is left of the budget is shared out equally, so that a query of one text does not wait for
two thousand that came before it; what the shares leave goes to the oldest again.
"""

from bisect import bisect_right
from collections.abc import Sequence


def share_inputs(requests: Sequence[tuple[Sequence[int], int]], max_tokens: int) -> list[int]:
    """Tokens each request computes in this step, whole inputs, in the order of the requests.

    A request is (`ends`: tokens up to and with each of its inputs, tokens computed so far), oldest
    first, and has an input left. More than `max_tokens` only where the oldest's next input is
    longer; then it goes alone.
    """
    granted = [0] * len(requests)
    if not requests:
        return granted
    ends, done = requests[0]
    granted[0] = ends[bisect_right(ends, done)] - done
    left = max_tokens - granted[0]
    waiting = len(requests)
    # Smallest needs first: what they leave of their share goes to those that need more.
    for i in sorted(range(len(requests)), key=lambda i: requests[i][0][-1] - requests[i][1]):
        share = max(0, left) // waiting
        left -= _extend(requests[i], granted, i, share)
        waiting -= 1
    for i, request in enumerate(requests):
        left -= _extend(request, granted, i, left)
    return granted


def _extend(request: tuple[Sequence[int], int], granted: list[int], number: int, room: int) -> int:
    """Grant more whole inputs of at most `room` tokens together. Returns how many tokens."""
    if room <= 0:
        return 0
    ends, done = request
    start = done + granted[number]
    fitting = bisect_right(ends, start + room)
    more = ends[fitting - 1] - start if fitting and ends[fitting - 1] > start else 0
    granted[number] += more
    return more
