"""Reading traces: formats, order, labels by popularity, conversations, what is refused."""

from pathlib import Path

import pytest

from bench.sim.traces import TABLES, read_csv, read_mooncake
from tests.bench.sim.trace_files import NUM_CONVERSATIONS, TURNS, write_csv, write_traces


def test_times_lengths_and_the_gap_after_the_last(tmp_path: Path) -> None:
    table = TABLES["azure2023_conv"](write_traces(tmp_path))
    assert table.at_s[:3].tolist() == [0.0, 1.0, 2.0]
    assert table.prompt_tokens[:3].tolist() == [100, 101, 102]
    assert table.duration_s == pytest.approx(200.0)
    assert table.rate == pytest.approx(1.0)
    assert table.tenant is None
    assert table.model is None


def test_labels_are_ranks_by_popularity(tmp_path: Path) -> None:
    table = TABLES["arena27_multimodel"](write_traces(tmp_path))
    assert table.model is not None
    assert table.model[:8].tolist() == [0, 1, 0, 2, 0, 1, 0, 3]


def test_rows_are_sorted_from_zero_and_lengths_are_one_at_least(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "own.csv.gz",
        ("t_s", "in_tokens", "out_tokens", "tenant"),
        [(30.5, 5, 0, "b"), (10.5, 0, 3, "a"), (20.5, 7, 9, "b")],
    )
    table = read_csv(path)
    assert table.at_s.tolist() == [0.0, 10.0, 20.0]
    assert table.prompt_tokens.tolist() == [1, 7, 5]
    assert table.output_tokens.tolist() == [3, 9, 1]
    assert table.tenant is not None
    assert table.tenant.tolist() == [1, 0, 0]


def test_lengths_are_drawn_where_a_trace_has_none(tmp_path: Path) -> None:
    data = write_traces(tmp_path)
    one, other = TABLES["gentd26"](data), TABLES["gentd26"](data)
    assert len(set(one.prompt_tokens.tolist())) > 100
    assert one.prompt_tokens.tolist() == other.prompt_tokens.tolist()
    assert one.tenant is not None
    assert one.model is not None
    assert (one.tenant.max(), one.model.max()) == (2, 4)


def test_turns_of_a_conversation_are_one(tmp_path: Path) -> None:
    data = write_traces(tmp_path)
    table = read_mooncake(data / "traces/mooncake_conversation.jsonl.gz")
    assert table.blocks is not None
    by_root: dict[int, list[tuple[int, ...]]] = {}
    for conversation, blocks in zip(table.conversation.tolist(), table.blocks, strict=True):
        by_root.setdefault(conversation, []).append(blocks)
    # The block that all begin with makes no conversation of all.
    assert len(by_root) == NUM_CONVERSATIONS
    for turns in by_root.values():
        assert len(turns) == TURNS
        assert turns[0][:-1] == turns[1][: len(turns[0]) - 1]


@pytest.mark.parametrize(
    ("head", "rows", "message"),
    [
        (("t_s", "in_tokens", "out_tokens"), [], "no rows"),
        (("time", "in_tokens", "out_tokens"), [(1, 2, 3)], "'t_s'"),
        (("t_s", "in_tokens"), [(1, 2)], "'out_tokens'"),
    ],
)
def test_a_file_without_the_columns_is_refused(
    tmp_path: Path, head: tuple[str, ...], rows: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(write_csv(tmp_path / "bad.csv.gz", head, rows))
