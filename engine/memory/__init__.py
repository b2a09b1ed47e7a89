"""Who owns which part of the arena: pages, KV extents, blocks, and the prefix cache over them.

A worker has one buffer of bytes, the arena. Nothing here touches its bytes; here is the book of who
owns them. Ownership goes down in this order, and comes back up in the opposite one:

    PagePool      every page: free, owned (weights or KV of one model), or fenced by a step
      Owner       one model's KV has pages; it never takes another's
        Extent    whole pages with some blocks of every layer of one layer group
          block   16 positions of one layer group: free, live (references), or cached (a name)
            RequestKv   tables of block ids: what one request refers to

    layers of a group
       0  |chunk|chunk|      |chunk|          a chunk: several blocks of one layer, side by side
       1  |chunk|chunk|      |chunk|          a column: the same blocks in all layers
       2  |chunk|chunk|      |chunk|
           `-----------'      `----'
           extent 0           extent 2        extent 1 went back to the pool; its pages may be
           pages 907, 911     pages 640, 902  anybody's now. A page need have no neighbour.

    request's table   [ 5 | 6 | 7 | 33 ]      block ids; block // blocks_per_extent is its extent
                        `-cached, shared-'

One step of one request, by who does it:

    KvCache.look, match       admission: references on blocks that the prefix cache has
    KvCache.reserve           scheduler: free slots, then pages of the pool, then cached blocks
    ChunkTable                the step takes the addresses as they are now; later changes go to a
                              new table, so a step in flight keeps those that it was launched with
    KvCache.advance           a step is known to have gone well: full blocks get names, blocks
                              behind a window are given back
    KvCache.release           the request ends or is preempted: the table there says what becomes
                              of each of its blocks
    KvMemory                  over all models: the least valuable extents without live blocks go
                              back to the pool, sparse ones are copied together
    PagePool.release, retire  pages stay fenced until the steps in flight that may read them ended

Rules that hold between any two calls, and that `check_integrity` of each class recounts:

- A page has one owner. A fenced one has none, but nobody may write it yet, unless it was claimed.
- A block is free, live or cached, never two of them; a full block is never written again.
- An extent without live blocks is *dead*: only dead ones are evicted, and a new block is put into
  one only where nothing else is left, for it would hold all of it.
- What a failed step wrote never gets a name, so nobody finds it.
- `OutOfPages` changes nothing. Who has to give way is decided above, in `engine/scheduling/`.

Does not know requests' tokens beyond their hashes, models' weights, or the clock. The files, from
the bottom up: page_pool, kv_plan (how a model's KV is cut, and where it lies), prefix_cache (what a
request holds, and how it is found again), kv_group (the blocks of one layer group), kv_cache (one
model), kv_memory (all models), policy/kv_value (what a cached extent is worth).
docs/memory.md says why it is so, with figures.
"""

from engine.memory.extent_plan import ChunkTable
from engine.memory.kv_cache import KvCache
from engine.memory.kv_memory import KvMemory
from engine.memory.kv_plan import GroupPlan, KvPlan, plan_pack
from engine.memory.page_pool import Owner, PagePool, PageRun
from engine.memory.prefix_cache import BlockDemand, Hit, RequestKv

__all__ = [
    "BlockDemand",
    "ChunkTable",
    "GroupPlan",
    "Hit",
    "KvCache",
    "KvMemory",
    "KvPlan",
    "Owner",
    "PagePool",
    "PageRun",
    "RequestKv",
    "plan_pack",
]
