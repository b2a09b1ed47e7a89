"""Which few workers are worth a look for a load, of a fleet of any size (pure).

Kept up as statuses come: which worker has which model in which state, and workers by bytes, free
and at rest (free, or of models that run nothing and may leave). Bytes are kept by size class, eight
to a doubling, so a status that changes little changes nothing here. What is handed out are names to
be judged exactly: figures may be one status old. Where none of them will do, the next look is at
others (`none_loadable`).
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from itertools import islice

MOST_CANDIDATES = 24
"""Workers that are judged for one load."""
OF_EACH = 8
"""Of these, so many that are warm, so many that are the emptiest, the rest those most at rest."""
MOST_SCANNED = 64
"""Names that are passed over while so many are looked for."""

MOST_TURNED = 1000
"""Models of which it is remembered how far the look has gone on."""

_THERE = frozenset({"resident", "loading", "draining"})
_NOT_LOADABLE = _THERE | {"failed"}
_NONE: Mapping[str, None] = {}


class FleetIndex:
    """Of the workers that have sent a status."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, str]] = {}  # by worker: model -> state
        self._holders: dict[tuple[str, str], dict[str, None]] = {}  # (model, state) -> workers
        self._by_free = _BySize()
        self._by_rest = _BySize()
        self._turned: dict[str, int] = {}  # by model: names of `_by_rest` that were of no use
        self._seen = ("", 0)  # the model that was asked about last, and the names seen for it

    def __len__(self) -> int:
        return len(self._states)

    def note_states(self, worker_id: str, states: Mapping[str, str]) -> None:
        """Where its models are; those not named are cold there."""
        before = self._states.get(worker_id, {})
        for model_id, state in before.items():
            if states.get(model_id) != state:
                holders = self._holders[model_id, state]
                del holders[worker_id]
                if not holders:
                    del self._holders[model_id, state]
        for model_id, state in states.items():
            if before.get(model_id) != state:
                self._holders.setdefault((model_id, state), {})[worker_id] = None
        self._states[worker_id] = dict(states)

    def note_bytes(self, worker_id: str, free_bytes: int, rest_bytes: int) -> None:
        """Its free memory, and that with models which run nothing and may leave."""
        self._by_free.put(worker_id, free_bytes)
        self._by_rest.put(worker_id, rest_bytes)

    def take(self, worker_id: str, num_bytes: int) -> None:
        """A load has been claimed there; its next status knows better."""
        for index in (self._by_free, self._by_rest):
            index.put(worker_id, max(0, index.size(worker_id) - num_bytes))

    def lose(self, worker_id: str) -> None:
        """It is gone."""
        if worker_id in self._states:
            self.note_states(worker_id, {})
            del self._states[worker_id]
            self._by_free.drop(worker_id)
            self._by_rest.drop(worker_id)

    def having(self, model_id: str, state: str) -> Collection[str]:
        """The workers where the model is in that state."""
        return self._holders.get((model_id, state), _NONE)

    def is_on_device(self, model_id: str) -> bool:
        """Whether any worker has it, or is loading it."""
        return bool(self.having(model_id, "resident") or self.having(model_id, "loading"))

    def replicated(self) -> list[str]:
        """Models that are resident on two workers and more."""
        return [
            model_id
            for (model_id, state), workers in self._holders.items()
            if state == "resident" and len(workers) > 1
        ]

    def candidates(
        self, model_id: str, avoid: Container[str] = (), *, and_failed: bool = False
    ) -> list[str]:
        """Where a load of it might go: warm copies, the emptiest, those most at rest; of a small
        fleet all.

        Of the last, none of those to `avoid`: loads against models in demand are due or planned
        there already. `and_failed`: also where it has failed.
        """
        if len(self._states) <= MOST_CANDIDATES:
            return list(self._states)
        warm = list(islice(self.having(model_id, "warm"), MOST_SCANNED))
        warm.sort(key=lambda worker_id: (-self._by_free.size(worker_id), worker_id))
        chosen = dict.fromkeys(warm[:OF_EACH])
        unfit = _THERE if and_failed else _NOT_LOADABLE
        up_to = len(chosen) + OF_EACH
        self._add(chosen, self._by_free.descending(), up_to, model_id, (), unfit)
        turned = self._turned.get(model_id, 0)
        rest = islice(self._by_rest.descending(), turned, None)
        seen = self._add(chosen, rest, MOST_CANDIDATES, model_id, avoid, unfit)
        self._seen = model_id, turned + seen
        return list(chosen)

    def none_loadable(self, model_id: str) -> None:
        """The candidates that were named last are of no use for it: other ones next time, and these
        again once all have had their turn."""
        name, seen = self._seen
        if name != model_id:
            return
        self._turned.pop(model_id, None)
        if seen < len(self._states):
            if len(self._turned) >= MOST_TURNED:
                del self._turned[next(iter(self._turned))]
            self._turned[model_id] = seen

    def nearest(self, model_id: str) -> list[str]:
        """Workers by which to tell what a load takes: two warm ones, else two candidates; all of a
        small fleet."""
        if len(self._states) <= MOST_CANDIDATES:
            return list(self._states)
        return list(islice(self.having(model_id, "warm") or self.candidates(model_id), 2))

    def with_room(self, model_id: str, num_bytes: int) -> Iterator[str]:
        """Where a load of so many bytes may find them free: warm copies, then the emptiest."""
        scanned = 0
        for worker_id in self._holders.get((model_id, "warm"), _NONE):
            scanned += 1
            if self._by_free.size(worker_id) >= num_bytes:
                yield worker_id
            if scanned == MOST_SCANNED:
                break
        for worker_id in self._by_free.descending():
            scanned += 1
            if self._by_free.size(worker_id) < num_bytes or scanned > 2 * MOST_SCANNED:
                return
            if self._states[worker_id].get(model_id) not in _NOT_LOADABLE:
                yield worker_id

    def spread(self, number: int) -> list[str]:
        """The emptiest workers, and as many others, other ones each time."""
        chosen = dict.fromkeys(islice(self._by_free.descending(), number))
        for worker_id in list(islice(self._states, number)):
            chosen[worker_id] = None
            self._states[worker_id] = self._states.pop(worker_id)  # to the end
        return list(chosen)

    def check_integrity(self, states: Mapping[str, Mapping[str, str]]) -> None:
        """Raises ValueError unless these are the workers' states."""
        if self._states != states:
            raise ValueError(f"the index has {self._states}, the workers {states}")
        holders: dict[tuple[str, str], set[str]] = {}
        for worker_id, models in states.items():
            for model_id, state in models.items():
                holders.setdefault((model_id, state), set()).add(worker_id)
        if {key: set(workers) for key, workers in self._holders.items()} != holders:
            raise ValueError(f"the index has holders {self._holders}, found {holders}")
        for index in (self._by_free, self._by_rest):
            if sorted(index.descending()) != sorted(states):
                raise ValueError(f"the index has sizes of {list(index.descending())}")

    def _add(
        self,
        chosen: dict[str, None],
        workers: Iterable[str],
        up_to: int,
        model_id: str,
        avoid: Container[str],
        unfit: Container[str | None],
    ) -> int:
        """Returns how many of the names were seen."""
        seen = scanned = 0
        for seen, worker_id in enumerate(workers):
            if len(chosen) >= up_to or scanned >= MOST_SCANNED:
                return seen
            if worker_id in avoid:
                continue
            scanned += 1
            if self._states[worker_id].get(model_id) not in unfit:
                chosen[worker_id] = None
        return seen + 1  # all


class _BySize:
    """Names by size class, the largest first."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._classes: dict[int, dict[str, None]] = {}
        self._order: list[int] = []  # of classes that have a name, ascending

    def size(self, name: str) -> int:
        """As it was put; 0 of nobody."""
        return self._sizes.get(name, 0)

    def put(self, name: str, size: int) -> None:
        """It has this size now."""
        before = self._sizes.get(name)
        self._sizes[name] = size
        wanted = _class_of(size)
        if before is not None:
            if _class_of(before) == wanted:
                return
            self._take_out(name, _class_of(before))
        if wanted not in self._classes:
            insort(self._order, wanted)
            self._classes[wanted] = {}
        self._classes[wanted][name] = None

    def drop(self, name: str) -> None:
        """It is gone. Harmless where it was not there."""
        size = self._sizes.pop(name, None)
        if size is not None:
            self._take_out(name, _class_of(size))

    def descending(self) -> Iterator[str]:
        """All names, the largest class first."""
        for number in reversed(self._order):
            yield from self._classes[number]

    def _take_out(self, name: str, number: int) -> None:
        names = self._classes[number]
        del names[name]
        if not names:
            del self._classes[number]
            del self._order[bisect_left(self._order, number)]


def _class_of(size: int) -> int:
    """Eight classes to each doubling."""
    if size <= 0:
        return -1
    doublings = size.bit_length()
    return doublings * 8 + ((size << 3 >> (doublings - 1)) & 7)
