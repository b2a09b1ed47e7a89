"""The picture of the arena that a worker tells: true to the pages, bounded, cheap at any size."""

import msgspec
import pytest

from engine.memory.page_pool import Owner, PagePool
from engine.models.status import make_layout
from engine.protocol import MAX_CELLS, Layout, WorkerStatus, decode_from_worker, encode


class Names:
    """As much of a Catalog as a layout asks for."""

    def label(self, instance_id: str) -> str:
        return {"unit-a": "org/a"}.get(instance_id, instance_id)


def told(pool: PagePool) -> list[tuple[str, int]]:
    layout = make_layout(pool, Names())  # type: ignore[arg-type]
    assert sum(pages for _, pages in layout.stretches) == pool.num_pages
    assert len(layout.stretches) <= MAX_CELLS
    assert len(set(layout.owners)) == len(layout.owners)
    return [(layout.owners[owner], pages) for owner, pages in layout.stretches]


def test_a_small_arena_is_told_page_for_page() -> None:
    pool = PagePool(32, 4096)
    assert told(pool) == [("free", 32)]
    pool.alloc_run(Owner("unit-a", "weights"), 10)
    pool.alloc_run(Owner("b", "weights"), 4)
    kv = pool.alloc_pages(Owner("unit-a", "kv"), 3)
    assert told(pool) == [
        ("org/a/weights", 10),
        ("b/weights", 4),
        ("free", 15),
        ("org/a/kv", 3),
    ]
    pool.begin_step(1)
    pool.release(Owner("unit-a", "kv"), kv)
    assert told(pool) == [("org/a/weights", 10), ("b/weights", 4), ("free", 18)], "fenced is free"


def test_a_large_arena_is_looked_at_in_so_many_places() -> None:
    pool = PagePool(70_001, 4096)
    for number in range(200):
        pool.alloc_run(Owner(f"m{number}", "weights"), 100)
    for number in range(2_000):
        pool.alloc_pages(Owner(f"m{number % 100}", "kv"), 3)
    found = told(pool)
    weights = sum(pages for name, pages in found if name.endswith("/weights"))
    assert weights == pytest.approx(20_000, rel=0.02)
    layout = make_layout(pool, Names())  # type: ignore[arg-type]
    assert len(msgspec.msgpack.encode(layout)) < 16_000


def status(**fields: object) -> WorkerStatus:
    given = WorkerStatus("e", "w", 1, 2, 3.0, 4096, 8, {"free": 8}, [], [], [], {})
    return msgspec.structs.replace(given, **fields)


def test_gateways_and_workers_of_before_the_layout_understand_each_other() -> None:
    new = encode(status(layout=Layout(["free"], [(0, 8)])))
    assert decode_from_worker(new) == status(layout=Layout(["free"], [(0, 8)]))
    fields = msgspec.msgpack.decode(new)
    ten = msgspec.msgpack.encode(
        fields[: 1 + WorkerStatus.__struct_fields__.index("batch_requests")]
    )
    assert decode_from_worker(ten).batch_requests == 0  # type: ignore[union-attr]
    # The first element is the type's name, the fields follow in order.
    known = 1 + WorkerStatus.__struct_fields__.index("layout")
    before = msgspec.msgpack.encode(fields[:known])
    assert decode_from_worker(before) == status(), "an older worker's"
    longer = msgspec.msgpack.encode([*fields, "what a later one adds"])
    assert decode_from_worker(longer) == decode_from_worker(new)
