"""Reading and writing states in the arena: what lies where, and what is never looked at."""

import torch

from kernels.state_rows import StateBatch, StateGeometry, read_states, write_states

GEOMETRY = StateGeometry((6, 2, 4), torch.float32, 3, 32)  # pieces of 2 heads, 64 bytes
ROWS = torch.tensor([0, 1, 2])


def batch(**changes: torch.Tensor) -> StateBatch:
    """Three rows; one of two states of the group; chunks of two slots."""
    whole = {
        # Six pieces in four chunks of two slots of two units, in no order.
        "table": torch.randperm(24).view(6, 4) * 4,
        "read_chunk": torch.tensor([0, 2, 3]),
        "read_slot": torch.tensor([1, 0, 1]),
        "write_chunk": torch.tensor([0, 1, 3]),
        "write_slot": torch.tensor([1, 1, 0]),
        "starts": torch.tensor([0, 1, 2, 3]),
        "fresh": torch.tensor([False, False, True]),
    }
    return StateBatch(**(whole | changes))


def test_what_is_written_is_read() -> None:
    torch.manual_seed(0)
    arena = torch.full((24 * 4 * 32,), 0xFF, dtype=torch.uint8)
    step = batch()
    table, states = step.table[3:], torch.randn(3, 6, 2, 4)
    write_states(arena, GEOMETRY, table, step, ROWS, states)
    same = batch(
        table=step.table,
        read_chunk=step.write_chunk,
        read_slot=step.write_slot,
        fresh=torch.zeros(3, dtype=torch.bool),
    )
    assert torch.equal(read_states(arena, GEOMETRY, table, same, ROWS), states)
    assert torch.equal(read_states(arena, GEOMETRY, table, same, ROWS[1:2]), states[1:2])
    written = arena.view(torch.float32).view(-1, 8).isnan().all(1)
    assert int((~written).sum()) == 3 * 3 * GEOMETRY.piece_units, "and nothing beside it"
    for row in range(3):
        for piece in range(3):
            unit = int(table[piece, step.write_chunk[row]]) + int(step.write_slot[row]) * 2
            part = arena[unit * 32 : unit * 32 + 64].view(torch.float32).view(2, 2, 4)
            assert torch.equal(part, states[row, 2 * piece : 2 * piece + 2])


def test_a_fresh_row_reads_zeros_from_memory_that_is_nan() -> None:
    arena = torch.full((24 * 4 * 32,), 0xFF, dtype=torch.uint8)
    states = read_states(arena, GEOMETRY, batch().table[:3], batch(), ROWS)
    assert states[:2].isnan().all()
    assert not states[2].any()


def test_states_are_kept_in_their_own_dtype() -> None:
    geometry = StateGeometry((6, 2, 4), torch.bfloat16, 3, 16)
    arena = torch.full((24 * 4 * 16,), 0xFF, dtype=torch.uint8)
    step = batch(fresh=torch.zeros(3, dtype=torch.bool))
    states = torch.full((3, 6, 2, 4), 1.0 + 2**-9)
    write_states(arena, geometry, step.table[:3], step, ROWS, states)
    again = batch(table=step.table, read_chunk=step.write_chunk, read_slot=step.write_slot)
    found = read_states(arena, geometry, step.table[:3], again, ROWS[:2])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), torch.ones(2, 6, 2, 4))
