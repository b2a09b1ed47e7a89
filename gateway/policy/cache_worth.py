"""Which kept answer goes first where its tenant has no more room. Pure.

GreedyDual-Size with saved cost (Cao and Irani, USENIX Symposium on Internet Technologies and
Systems, 1997), counting each use as LFU does: an entry's worth is the tenant's clock plus what its
hits have saved per byte, the one hit that it was made for included. The least worth goes first, and
the clock moves up to it: so what was saved long ago counts less, and what is never used again goes
in the end, however dear it was. answers.lua has the same arithmetic for entries in Redis.
"""


def worth_when_made(clock: float, cost_nanos: int, size_bytes: int) -> float:
    """Of an entry that nobody has used yet."""
    return clock + max(1, cost_nanos) / size_bytes


def worth_when_used(worth: float, clock: float, saved_nanos: int, size_bytes: int) -> float:
    """After one more hit."""
    return max(worth, clock) + max(1, saved_nanos) / size_bytes
