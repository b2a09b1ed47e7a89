"""A layer's state and a step's rows in it: what is read, written, stepped and refused."""

from dataclasses import replace

import pytest
import torch

from kernels.mixer_state import advance_ref
from kernels.state_rows import StateGeometry, read_states, write_states
from tests.kernels.state_case import StateRow, bits, ragged_rows, state_case


@pytest.mark.parametrize("num_pieces", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_found_wherever_their_pieces_lie(num_pieces: int, dtype: torch.dtype) -> None:
    case = state_case((6, 5, 4), ragged_rows(), num_pieces, dtype)
    state, rows = case.copy(), torch.arange(len(case.first))
    place = state.geometry, state.table
    found = read_states(state.arena, *place, state.batch, rows)
    assert torch.equal(found, case.first)  # zeros for fresh rows, over NaN
    some = torch.tensor([4, 1])
    write_states(state.arena, *place, state.batch, some, found[some] + 1)
    batch = state.batch
    behind = replace(batch, read_chunk=batch.write_chunk, read_slot=batch.write_slot)
    behind = replace(behind, fresh=torch.zeros_like(batch.fresh))
    assert torch.equal(read_states(state.arena, *place, behind, some), found[some] + 1)
    changed = int((bits(state) != bits(case.state)).sum())
    assert changed == 2 * found[0].numel()


def test_rows_step_through_their_own_tokens() -> None:
    """Each step adds the token's number; rows without tokens stay."""
    case = state_case((2, 3), [StateRow(2), StateRow(0), StateRow(3, fresh=True)])
    state, seen = case.copy(), []

    def step(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.tolist())
        return states + tokens[:, None, None]

    advance_ref(state, step)
    assert seen == [[0, 2], [1, 3], [4]]
    rows = torch.tensor([0, 2])
    batch = replace(state.batch, fresh=torch.zeros(3, dtype=torch.bool))
    ends = read_states(state.arena, state.geometry, state.table, batch, rows)
    assert torch.equal(ends, case.first[rows] + torch.tensor([1.0, 9.0])[:, None, None])
    assert int((bits(state) != bits(case.state)).sum()) == 12


def test_other_states_are_refused() -> None:
    state = state_case((4, 3), [StateRow(1)], 2).state
    state.check((4, 3), torch.float32)
    with pytest.raises(ValueError, match=r"a state \[4, 3\]"):
        state.check((4, 4), torch.float32)
    with pytest.raises(ValueError, match="a state"):
        state.check((4, 3), torch.bfloat16)
    uneven = replace(state, geometry=StateGeometry((4, 3), torch.float32, 3, 16))
    with pytest.raises(ValueError, match="in 3 pieces"):
        uneven.check((4, 3), torch.float32)
    with pytest.raises(ValueError, match="no gaps"):
        replace(state, table=state.table.T.contiguous().T).check((4, 3), torch.float32)
