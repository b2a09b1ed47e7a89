"""How a prompt begins, as a ticket says it: marks that name it and tell nothing of it (stage 5).

The dispatcher sends a request where the KV of its prompt's beginning is likely to be. It compares
marks: each is a hash of the first 16, 32, 64 ... tokens, with the tenant and the model, because a
worker gives KV to nobody else. So it is known to within half how much two prompts share, and
prompts stay with their gateway.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from gateway.dispatch.policy.prefix_places import FIRST_TOKENS, MAX_MARKS

_TOKEN_BYTES = array("I").itemsize


def prefix_marks(tenant_id: str, model_id: str, token_ids: Sequence[int]) -> list[int]:
    """The marks of a prompt, from its shortest beginning on; about 2 us and 1 us a thousand tokens.
    Raises OverflowError for ids that are none."""
    if len(token_ids) < FIRST_TOKENS:
        return []
    digest = blake2b(f"{tenant_id}\0{model_id}".encode(), digest_size=8)
    data = memoryview(array("I", token_ids[: FIRST_TOKENS << (MAX_MARKS - 1)])).cast("B")
    marks: list[int] = []
    begin, end = 0, FIRST_TOKENS * _TOKEN_BYTES
    while end <= len(data):
        digest.update(data[begin:end])
        marks.append(int.from_bytes(digest.digest(), "big"))
        begin, end = end, 2 * end
    return marks
