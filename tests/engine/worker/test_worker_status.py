"""When a worker tells its arena's layout: to whoever comes, when it has changed, and seldom."""

from pathlib import Path

import pytest

from engine.protocol import Layout
from engine.worker.worker_status import LAYOUT_EVERY_S, StatusBoard
from tests.engine.scripted_engine import ScriptedEngine
from tests.engine.worker_rig import worker_config

FIRST = Layout(["free"], [(0, 16)])
SECOND = Layout(["m/weights", "free"], [(0, 4), (1, 12)])


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(told_layout=FIRST)


@pytest.fixture
def board(engine: ScriptedEngine, tmp_path: Path) -> StatusBoard:
    config = worker_config(str(tmp_path))
    return StatusBoard(config, "epoch", engine, dict)


def told(board: StatusBoard, now_s: float) -> Layout | None:
    board.ask()
    status = board.collect(now_s, draining=False)
    assert status is not None
    return status.layout


def test_it_is_told_once_and_again_when_it_has_changed(
    board: StatusBoard, engine: ScriptedEngine
) -> None:
    assert told(board, 10.0) == FIRST
    assert told(board, 10.0 + LAYOUT_EVERY_S) is None, "as told before"
    engine.told_layout = SECOND
    assert told(board, 10.0 + 2 * LAYOUT_EVERY_S) == SECOND


def test_it_is_made_seldom_however_often_the_worker_speaks(
    board: StatusBoard, engine: ScriptedEngine
) -> None:
    for n in range(100):
        engine.told_layout = SECOND if n % 2 else FIRST
        told(board, 10.0 + n * LAYOUT_EVERY_S / 50)
    assert engine.num_layouts == 2


def test_who_comes_is_told_and_nobody_is_left_with_an_older_one(
    board: StatusBoard, engine: ScriptedEngine
) -> None:
    assert told(board, 10.0) == FIRST
    engine.told_layout = SECOND
    assert board.greeting(10.5, draining=False).layout == SECOND
    engine.told_layout = FIRST  # as the others have it, and the one that came has not
    assert told(board, 10.0 + LAYOUT_EVERY_S) == FIRST
