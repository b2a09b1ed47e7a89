"""Where a step's inputs and tables lie: growing, and what graphs know of it."""

import gc
import weakref

import pytest
import torch

from engine.gpu import device_step
from engine.gpu.device_step import FIRST_INPUT_BYTES, DeviceTable, InputBuffer
from engine.memory.extent_plan import ChunkTable
from engine.memory.kv_plan import GroupPlan, plan_kv
from kernels.paged_attention import LayerGeometry
from tests.engine.fake_device import FakeDevice

PAGE_BYTES = 1 << 16
LAYER = LayerGeometry(num_kv_heads=2, k_dim=16, v_dim=16)


def test_an_outgrown_buffer_is_kept() -> None:
    """Steps in flight read it, and graphs know its address: nobody else may get it."""
    buffer = InputBuffer(FakeDevice())
    first, address = weakref.ref(buffer._buffer), buffer.address
    packed = torch.arange(FIRST_INPUT_BYTES + 1, dtype=torch.int64).to(torch.uint8)
    assert torch.equal(buffer.bring(packed)[: len(packed)], packed)
    gc.collect()
    assert first() is not None
    assert buffer.address != address


def test_a_table_says_where_it_lies_and_how_wide_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider one might come to lie where a narrow one was: graphs must not take it for that."""
    monkeypatch.setattr(device_step, "FIRST_TABLE_BYTES", 2 * 16 * 8)
    device = FakeDevice()
    table, free = DeviceTable(device, num_layers=2), device.memory()
    assert device.memory() == free, "a unit that has not run takes memory"
    plan = plan_kv([LAYER, LAYER], torch.float32, 16, PAGE_BYTES, 4096)
    chunks = ChunkTable(plan.groups[0], PAGE_BYTES, torch.device("cpu"))
    place(chunks, plan.groups[0], range(1))
    table.update(chunks, chunks.note_changes())
    first, at = weakref.ref(table.table), table.place
    assert at == (table.table.data_ptr(), 16)
    place(chunks, plan.groups[0], range(1, 16 // plan.groups[0].num_chunks + 1))
    table.update(chunks, chunks.note_changes())
    assert table.place[1] >= 32
    gc.collect()
    assert first() is not None
    known = chunks.capture()
    assert torch.equal(table.table[:, :16], known[:, :16])


def place(chunks: ChunkTable, plan: GroupPlan, extents: range) -> None:
    pages = plan.pages_per_extent
    for extent in extents:
        chunks.place(extent, range(extent * pages, (extent + 1) * pages))
