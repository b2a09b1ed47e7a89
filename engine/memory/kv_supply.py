"""Where the scheduler gets pages for KV: fences that passed, cached KV, sparse extents."""

from collections.abc import Sequence

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.memory.kv_memory import KvMemory
from engine.memory.page_pool import PagePool


class PoolSupply:
    """Implements `model_queue.KvSupply` over one pool; has the memory of all units' KV."""

    def __init__(self, config: EngineConfig, pool: PagePool, backend: Backend) -> None:
        self._pool = pool
        self._backend = backend
        self.num_spare_pages = int(config.kv_low_watermark * pool.num_pages)
        high = int(config.kv_high_watermark * pool.num_pages)
        self.kv = KvMemory(pool, self._copy, self.num_spare_pages, high)

    def reclaim(self) -> tuple[int, int]:
        """Free the pages whose fence has passed: (how many, how many are still fenced)."""
        freed = self._pool.retire(self._backend.last_done())
        return len(freed), self._pool.num_fenced

    def make_room(self, num_pages: int) -> int:
        """Evict cached KV, then copy sparse extents together; pages on their way back."""
        num_freed = self.kv.evict(num_pages)
        if num_freed < num_pages:
            num_freed += self.kv.compact(num_pages - num_freed)
        return num_freed

    def num_kv_pages(self) -> int:
        """Pages that KV could have beside the weights that are there."""
        by_owner = self._pool.pages_by_owner()
        return self._pool.num_pages - sum(
            count for owner, count in by_owner.items() if owner.kind == "weights"
        )

    def _copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Sources that are released from now on stay fenced until the copies have ended."""
        self._pool.begin_copies()
        self._backend.copy_within(moves)
