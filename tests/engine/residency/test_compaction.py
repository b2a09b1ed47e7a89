"""The planner on drawn and on random pictures; each plan is carried out page by page."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.page_pool import PagePool, PageRun
from engine.residency.compaction import Move, Picture, RunPlan, WeightRun, plan_runs

CODES = {
    ".": PagePool.FREE,
    "f": PagePool.FENCED,
    "k": PagePool.KV,
    "c": PagePool.KV,
    "#": PagePool.WEIGHTS,
}


def picture(drawing: str, fixed_kv: bool = False) -> Picture:
    """`.` free, `f` fenced, `k` live KV, `c` cached KV, `#` weights that stay, letters: others.

    A letter's neighbours of the same case and name are one run: `aaAb` is a run of model "a", a
    second one of it, and one of "b".
    """
    movable: list[WeightRun] = []
    for page, sign in enumerate(drawing):
        if sign in CODES:
            continue
        if page and drawing[page - 1] == sign:
            last = movable.pop()
            run = PageRun(last.run.first, last.run.num_pages + 1)
            movable.append(WeightRun(last.instance_id, last.segment, run))
        else:
            movable.append(WeightRun(sign.lower(), len(movable), PageRun(page, 1)))
    kinds = bytes(CODES.get(sign, PagePool.WEIGHTS) for sign in drawing)
    evictable = np.array([sign == "c" for sign in drawing])
    fixed = np.array([sign == "k" for sign in drawing]) if fixed_kv else None
    return Picture(kinds, evictable, movable, fixed)


def carry_out(drawing: str, plan: RunPlan, lengths: Sequence[int]) -> str:
    """The pages afterwards: `N` the incoming model, `-` where something was and nothing is now."""
    assert [run.num_pages for run in plan.runs] == list(lengths)
    cells = [(sign, page) for page, sign in enumerate(drawing)]
    wanted = {page for run in plan.runs for page in run.pages}
    targets = {page for move in plan.moves for page in move.target.pages}
    in_the_way = {page for page in wanted | targets if drawing[page] in "kc"}
    assert set(plan.kv_pages) == in_the_way
    for page in plan.kv_pages:
        cells[page] = ("-", -1)
    for move in plan.moves:
        # Forwards, as the device does it: a move only ever goes down.
        assert move.target.first < move.source.first
        assert move.target.num_pages == move.source.num_pages
        for source, target in zip(move.source.pages, move.target.pages, strict=True):
            assert cells[target][0] in "-.f"
            assert cells[source] == (drawing[source], source), "overwritten before it was read"
            cells[target] = cells[source]
            cells[source] = ("-", -1)
    for page in wanted:
        assert cells[page][0] in "-.f", "the incoming model's page is taken"
        cells[page] = ("N", -1)
    assert len(wanted) == sum(lengths)
    return "".join(sign for sign, _ in cells)


def plan_of(drawing: str, *lengths: int, home: Sequence[PageRun] = ()) -> str | None:
    plan = plan_runs(picture(drawing), lengths, home)
    return None if plan is None else carry_out(drawing, plan, lengths)


@pytest.mark.parametrize(
    ("drawing", "lengths", "expected"),
    [
        ("......", [2, 3], "NNNNN."),  # the longest lies lowest
        ("..#...#....", [3, 2], "NN#NNN#...."),  # the lowest hole that is long enough
        ("..#f.f#....", [3], "..#NNN#...."),  # a fence is only waited for
        ("kk#cc#.k..", [2], "kk#cc#.kNN"),  # a free window, though higher
        ("kk#cc#.k.#", [2], "kk#NN#.k.#"),  # cached KV is cheaper than two live pages
        ("kk#ck#.k.#", [3], "kk#ck#NNN#"),  # the window with the fewest
        ("aa.bb.kk.", [2], "aa.bbNNk."),  # KV is moved before weights are
        ("a..b..#", [4], "abNNNN#"),
        ("a.b.A.B.#", [2, 2], "abNNABNN#"),
        ("#.a.#.b..#", [3], "#.a.#bNNN#"),  # the cheapest stretch
        ("..aaaaaa..b..", [4], "..aaaaaabNNNN"),
        ("k.aa.k.aa..", [6], None),  # live KV keeps its memory
        ("c.aa.c.aa..", [7], "aaaaNNNNNNN"),
        ("#.#.#.#", [2], None),
        (".", [], "."),
    ],
)
def test_drawn(drawing: str, lengths: list[int], expected: str | None) -> None:
    assert plan_of(drawing, *lengths) == expected


def test_home_comes_first_where_only_kv_stands_in_it() -> None:
    home = [PageRun(4, 2), PageRun(7, 1)]
    assert plan_of("........", 2, 1, home=home) == "....NN.N"
    assert plan_of("....kf.c..", 2, 1, home=home) == "....NN.N.."
    assert plan_of("....k#.c..", 2, 1, home=home) == "NNN.k#.c.."
    assert plan_of("....ka.c..", 2, 1, home=home) == "NNN.ka.c.."
    assert plan_of("........", 1, 2, home=home) == "NNN....."  # another cut: no home
    assert plan_of(".....", 2, 1, home=home) == "NNN.."  # a smaller device


def test_kv_that_stays_is_walked_around() -> None:
    assert plan_runs(picture("k.k.k..", fixed_kv=True), [3]) is None
    plan = plan_runs(picture("k.k.kc.", fixed_kv=True), [2])
    assert plan == RunPlan((PageRun(5, 2),), (5,))


def test_moves_of_several_models_say_whose_they_are() -> None:
    plan = plan_runs(picture(".aaB."), [2])
    assert plan is not None
    assert plan.moves == (
        Move("a", 0, PageRun(1, 2), PageRun(0, 2)),
        Move("b", 1, PageRun(3, 1), PageRun(2, 1)),
    )


drawings = st.text(st.sampled_from(".......fkkcaAbB#"), min_size=1, max_size=40)
loose = st.text(st.sampled_from(".....fkcaAbB"), min_size=1, max_size=40)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@settings(max_examples=600, deadline=None)
@given(drawing=drawings, lengths=cuts)
def test_a_plan_can_be_carried_out_and_keeps_what_lives(drawing: str, lengths: list[int]) -> None:
    after = plan_of(drawing, *lengths)
    if after is None:
        return
    for sign in "aAbB":
        assert after.count(sign) == drawing.count(sign)
    for page, sign in enumerate(drawing):
        assert sign != "#" or after[page] == "#"
    # What is left outside has room for all live KV that had to go.
    outside = sum(sign in ".f-c" for sign in after)
    assert outside >= drawing.count("k") - after.count("k")


@settings(max_examples=600, deadline=None)
@given(drawing=loose, lengths=cuts)
def test_where_nothing_stays_there_is_a_plan_whenever_memory_suffices(
    drawing: str, lengths: list[int]
) -> None:
    spare = sum(sign in ".fc" for sign in drawing)
    assert (plan_of(drawing, *lengths) is not None) == (spare >= sum(lengths))


def test_a_large_device_full_of_fragments() -> None:
    """70,000 pages, 80 segments: the plan holds, all by slides or all in windows."""
    chance = random.Random(1)
    drawing = ""
    while len(drawing) < 69_000:
        sign = chance.choice("aAbB..kc")
        drawing += sign * chance.randint(1, 60)
    spare = sum(sign in ".fc" for sign in drawing)
    lengths = [spare // 90 + number % 7 for number in range(80)]
    assert plan_of(drawing, *lengths) is not None
    assert plan_of("k." * 34_000 + "#" * 1000, *[100 + number for number in range(80)]) is not None
