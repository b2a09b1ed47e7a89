"""KvCache, KvMemory and PagePool with a device that is a queue, and memory that is stamped.

Everything handed to the device (steps and copies) waits in one queue and is carried out when the
test says so, in order, as it was captured. A step writes, for each of its tokens and each layer, a
stamp that names the model, the layer and all tokens up to there, then reads back whatever its rows
may attend to. Pages whose fence has passed are overwritten at once, beside the queue, as a loader
would. So a block that is shared wrongly, reused too early or moved without its table is a stamp
that does not agree.

The oracle beside it is a dict: which (group, hash) pairs could be found if nothing were ever lost.
"""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.kv_plan import plan_kv
from engine.memory.page_pool import Owner, PagePool
from engine.memory.prefix_cache import HOLE, RequestKv, extend_hashes
from engine.memory.state_slots import Move
from kernels.paged_attention import LayerGeometry

PAGE_BYTES = 4096
BLOCK_TOKENS = 4
STAMP_BYTES = 8
MAX_CHUNK = 12
POISON = 0xFF
_MASK = (1 << 64) - 1

UNITS: dict[str, list[LayerGeometry]] = {
    "plain": [LayerGeometry(1, 16, 16)] * 3,
    "uneven": [LayerGeometry(2, 8, 24)] * 2 + [LayerGeometry(1, 8, 8)],
    "hybrid": [LayerGeometry(1, 16, 16, window) for window in (6, 0, 6, 6, 0)],
    "chunks": [LayerGeometry(1, 16, 16, chunk=chunk) for chunk in (10, 10, 0, 8)],
    "windows": [LayerGeometry(1, 32, 8, 5), LayerGeometry(1, 8, 8, 13)],
}


@dataclass(eq=False, repr=False)
class Job:
    """A request: `num_good` tokens are known to be computed, `num_launched` are under way."""

    instance: str
    tenant: str
    token_ids: list[int]
    kv: RequestKv
    num_good: int = 0
    num_launched: int = 0
    is_doubtful: bool = False  # a step of its model failed meanwhile: nothing of it is kept

    def __repr__(self) -> str:
        return f"<{self.instance} {self.tenant} {self.num_good}/{len(self.token_ids)}>"


@dataclass(eq=False)
class Step:
    """Rows (job, first, end). `wrong`: those that read what is not theirs, once it has run."""

    number: int
    instance: str
    rows: list[tuple[Job, int, int]]
    fails: bool
    wrong: set[Job] = field(default_factory=set)
    done: bool = False


def chain(instance: str, tokens: list[int]) -> list[int]:
    """One number for each prefix of the tokens, in this model."""
    value, found = zlib.crc32(instance.encode()), []
    for token in tokens:
        value = mix(value ^ mix(token + 1))
        found.append(value)
    return found


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class World:
    """Several models over one pool."""

    def __init__(self, num_pages: int, instances: list[str], low: int = 0, high: int = 0) -> None:
        self.pool = PagePool(num_pages, PAGE_BYTES)
        self.bytes = np.full(num_pages * PAGE_BYTES, POISON, dtype=np.uint8)
        self.words = self.bytes.view(np.uint64)
        self.queue: deque[Callable[[], None]] = deque()
        self.memory = KvMemory(self.pool, self, low, high)
        self.caches: dict[str, KvCache] = {}
        for number, instance in enumerate(instances):
            plan = plan_kv(UNITS[instance], torch.float32, BLOCK_TOKENS, PAGE_BYTES, num_pages)
            cache = KvCache(
                Owner(instance, "kv"), plan, self.pool, torch.device("cpu"), max_chunk=MAX_CHUNK
            )
            self.caches[instance] = cache
            self.memory.register(instance, cache, 1.0 + number)
        self.jobs: list[Job] = []
        self.steps: deque[Step] = deque()
        self.num_steps = 0
        self.num_ended = 0
        self.known: dict[str, list[set[bytes]]] = {
            instance: [set() for _ in cache.groups] for instance, cache in self.caches.items()
        }
        self.now_s = 0.0

    # The device ---------------------------------------------------------------------------

    def launch(self, instance: str, rows: list[tuple[Job, int]], fails: bool) -> Step:
        """A step over blocks that are reserved already: (job, tokens)."""
        cache = self.caches[instance]
        self.num_steps += 1
        self.pool.begin_step(self.num_steps)
        laid = [(job, job.num_launched, job.num_launched + tokens) for job, tokens in rows]
        step = Step(self.num_steps, instance, laid, fails)
        captured = [
            (job, first, end, [list(table) for table in job.kv.tables], list(job.token_ids))
            for job, first, end in laid
        ]
        tables = [group.table for group in cache.groups]

        def run() -> None:
            for job, first, end, blocks, tokens in captured:
                names = np.array(chain(instance, tokens[:end]), dtype=np.uint64)
                for g, table in enumerate(tables):
                    if not self._run_row(instance, g, table, blocks[g], names, first, fails):
                        step.wrong.add(job)
            step.done = True
            self.num_ended = step.number

        for job, _, end in laid:
            job.num_launched = end
        self.queue.append(run)
        self.steps.append(step)
        return step

    def pass_step(self) -> None:
        """An empty step, so that fences pass."""
        self.num_steps += 1
        number = self.num_steps
        self.pool.begin_step(number)

        def run() -> None:
            self.num_ended = number

        self.queue.append(run)

    def run_device(self, operations: int) -> None:
        """Carry out so much of what was handed over, and let loaders into what is free then."""
        for _ in range(min(operations, len(self.queue))):
            self.queue.popleft()()
        for page in self.pool.retire(self.num_ended):
            self.bytes[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = POISON

    def _run_row(
        self,
        instance: str,
        g: int,
        table: torch.Tensor,
        blocks: list[int],
        names: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
        first: int,
        fails: bool,
    ) -> bool:
        """Whether it read what belongs there."""
        plan = self.caches[instance].plan.groups[g]
        end = len(names)
        low = plan.block.layer.first_seen(first)
        position = np.arange(low, end)
        block = np.array(blocks)[position // BLOCK_TOKENS]
        assert HOLE not in block, "a step reads behind what was freed"
        chunk, slot = block // plan.blocks_per_chunk, block % plan.blocks_per_chunk
        units = table.numpy()[:, chunk] + slot * plan.block.block_units
        start = units * plan.block.unit_bytes // STAMP_BYTES
        places = start + position % BLOCK_TOKENS
        salt = np.array([mix(1000 * g + i) for i in range(len(plan.layers))], dtype=np.uint64)
        wanted = names[low:] ^ salt[:, None]
        seen = first - low
        self.words[places[:, seen:]] = ~wanted[:, seen:] if fails else wanted[:, seen:]
        return bool((self.words[places[:, :seen]] == wanted[:, :seen]).all())

    def last_done(self) -> int:
        return self.num_ended

    def copy_within(self, moves: Sequence[Move]) -> None:
        """As a device: behind the step that was launched last."""
        pieces = list(moves)

        def run() -> None:
            for source, target, size in pieces:
                self.bytes[target : target + size] = self.bytes[source : source + size]

        self.queue.append(run)

    # The oracle ---------------------------------------------------------------------------

    def hashes(self, job: Job, num_tokens: int) -> list[bytes]:
        """Names of the job's full blocks among its first tokens."""
        hashes: list[bytes] = []
        extend_hashes(hashes, job.kv.salt, job.token_ids, BLOCK_TOKENS, num_tokens // BLOCK_TOKENS)
        return hashes

    def expected_hit(self, job: Job) -> int:
        """Tokens that a match must find: every length is tried."""
        most = (len(job.token_ids) - 1) // BLOCK_TOKENS
        hashes = self.hashes(job, most * BLOCK_TOKENS)
        for length in range(most, 0, -1):
            if all(
                hashes[i] in self.known[job.instance][g]
                for g, group in enumerate(self.caches[job.instance].groups)
                for i in range(group.plan.first_needed(length * BLOCK_TOKENS), length)
            ):
                return length * BLOCK_TOKENS
        return 0

    def learn(self, job: Job, first: int) -> None:
        """The job's good tokens are about to be told, those from `first` on for the first time.

        A block that was told before is not offered again, though another's copy may be gone.
        """
        if job.is_doubtful:
            return
        for g, table in enumerate(job.kv.tables):
            for i, name in enumerate(self.hashes(job, job.num_good)):
                if i >= first // BLOCK_TOKENS and table[i] != HOLE:
                    self.known[job.instance][g].add(name)

    def forget_lost(self) -> None:
        """After an operation that may take memory from cached blocks: what is gone is gone.

        What a request refers to must not be among it.
        """
        for instance, cache in self.caches.items():
            for g, group in enumerate(cache.groups):
                self.known[instance][g] = {
                    name for name in self.known[instance][g] if group.index.find(name) is not None
                }

    def check(self) -> None:
        """Everything that must hold at any moment."""
        self.pool.check_integrity()
        self.memory.check_integrity()
        for instance, cache in self.caches.items():
            cache.check_integrity([job.kv for job in self.jobs if job.instance == instance])
            for g, group in enumerate(cache.groups):
                found = {
                    name for name in self.known[instance][g] if group.index.find(name) is not None
                }
                assert found == self.known[instance][g], (
                    f"{instance} {g} lost a block that it had to keep"
                )
                assert len(group.index) == len(found), f"{instance} {g} keeps what it was not told"
        mask = self.memory.evictable_mask()
        assert int(mask.sum()) == self.memory.num_evictable()
        for page in np.flatnonzero(mask):
            owner = self.pool.owner_of(int(page))
            assert owner is not None
            assert owner.kind == "kv"
