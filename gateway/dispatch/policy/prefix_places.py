"""Where the KV of prompts' beginnings is likely to be (pure).

A mark names the first 16, 24, 32, 48, 64 ... tokens of a prompt, as many as MARKED says, with the
tenant and the model, because a worker gives KV to nobody else. So the dispatcher knows to within a
third how much two prompts share, and prompts stay with their gateway.

Workers that were granted a prompt hold its KV for a while: who was granted which mark is kept here,
the oldest forgotten beyond MOST_MARKS. What a worker had of a model is void once the model, or the
process, has left. Nobody tells what else workers evict: a place that is out of date costs a request
no more than going where it would have been best, and is true again once it has run there.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

MARKED = tuple(tokens << step for step in range(13) for tokens in (16, 24))
"""Tokens that each mark names. Two prompts share up to a half more than their last common one says,
as far as 98,304."""
MOST_MARKS = 1 << 17
MOST_PLACES = 4
"""Workers remembered for a mark, the latest ones."""


TOKEN_BYTES = array("I").itemsize


class PrefixPlaces:
    """Marks and the workers that were granted them."""

    def __init__(self, most_marks: int = MOST_MARKS) -> None:
        self._most_marks = most_marks
        self._places: OrderedDict[int, dict[str, float]] = OrderedDict()
        """By mark: worker -> when it was granted last."""
        self._void_s: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note(self, marks: Sequence[int], worker_id: str, now_s: float) -> None:
        """The worker was granted a prompt."""
        for mark in marks:
            places = self._places.pop(mark, {})
            places.pop(worker_id, None)
            if len(places) >= MOST_PLACES:
                del places[next(iter(places))]
            places[worker_id] = now_s
            self._places[mark] = places
        while len(self._places) > self._most_marks:
            self._places.popitem(last=False)

    def hits(self, marks: Sequence[int], model_id: str) -> Mapping[str, int]:
        """Tokens of the prompt that each worker is likely to have KV of; those with none are left
        out."""
        found: dict[str, int] = {}
        for number in range(len(marks) - 1, -1, -1):
            for worker_id, granted_s in self._places.get(marks[number], {}).items():
                if worker_id not in found and granted_s > self._void_until_s(worker_id, model_id):
                    found[worker_id] = MARKED[number]
        return found

    def void(self, worker_id: str, until_s: float, model_id: str = "") -> None:
        """The KV of a model there that was granted until then is gone, or (no model) of all."""
        if not model_id:
            self._void_s = {key: at_s for key, at_s in self._void_s.items() if key[0] != worker_id}
        self._void_s[worker_id, model_id] = until_s

    def keep_models(self, model_ids: Collection[str]) -> None:
        """Forget models that are not hosted any more."""
        self._void_s = {
            key: at_s for key, at_s in self._void_s.items() if not key[1] or key[1] in model_ids
        }

    def _void_until_s(self, worker_id: str, model_id: str) -> float:
        of_all = self._void_s.get((worker_id, ""), -math.inf)
        return max(of_all, self._void_s.get((worker_id, model_id), -math.inf))


def prefix_marks(tenant_id: str, model_id: str, token_ids: Sequence[int]) -> list[int]:
    """The marks of a prompt, from its shortest beginning on; about 2 us and 1 us a thousand tokens.
    Raises OverflowError for ids that are none."""
    if len(token_ids) < MARKED[0]:
        return []
    digest = blake2b(f"{tenant_id}\0{model_id}".encode(), digest_size=8)
    data = memoryview(array("I", token_ids[: MARKED[-1]])).cast("B")
    marks: list[int] = []
    begin = 0
    for num_tokens in MARKED:
        end = num_tokens * TOKEN_BYTES
        if end > len(data):
            break
        digest.update(data[begin:end])
        marks.append(int.from_bytes(digest.digest(), "big"))
        begin = end
    return marks
