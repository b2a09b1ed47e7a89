"""Plots: ticks, places, broken lines, escaped words; every picture is well-formed XML."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from bench.sim import plots
from bench.sim.plots import Axis


def parsed(text: str) -> ElementTree.Element:
    """The picture and its legend as a tree."""
    return ElementTree.fromstring(f"<div>{text}</div>")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 37.0, [0, 10, 20, 30]),
        (0.3, 0.7, [0.3, 0.4, 0.5, 0.6, 0.7]),
        (5.0, 5.0, [5.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert plots.ticks(low, high) == pytest.approx(expected)


def test_ticks_of_time_are_round_in_its_unit() -> None:
    assert plots.time_ticks(0, 600) == [0, 120, 240, 360, 480, 600]
    assert plots.time_ticks(0, 86_400) == [0, 18_000, 36_000, 54_000, 72_000]


def test_ticks_of_decades() -> None:
    assert plots.log_ticks(0.01, 100) == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert plots.log_ticks(1, 20) == pytest.approx([1, 2, 5, 10, 20])
    assert len(plots.log_ticks(30.0, 37.0)) > 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2e-4, "200 µs"), (0.25, "250 ms"), (12, "12 s"), (300, "5 min"), (10_800, "3 h")],
)
def test_times_are_short(value: float, text: str) -> None:
    assert plots.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (1234, "1234"), (12_500, "12.5k"), (3.2e6, "3.2M"), (4e9, "4G")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert plots.number(value) == text


def test_a_line_goes_through_its_points_and_breaks_at_gaps() -> None:
    xs, ys = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 10.0, math.nan, 5.0])
    tree = parsed(plots.lines({"a": (xs, ys)}, Axis("t"), Axis("v")))
    path = tree.find(".//path")
    assert path is not None
    moves = re.findall(r"([ML])([\d.]+),([\d.]+)", path.attrib["d"])
    assert [pen for pen, _, _ in moves] == ["M", "L", "M"]
    assert float(moves[0][1]) == plots.LEFT
    assert float(moves[1][2]) == plots.TOP
    assert float(moves[0][2]) == plots.HEIGHT - plots.BOTTOM


def test_layers_lie_on_each_other() -> None:
    xs = np.array([0.0, 1.0])
    layers = {"low": np.array([1.0, 1.0]), "high": np.array([3.0, 3.0])}
    polygons = parsed(plots.stacked(xs, layers, Axis(), Axis())).findall(".//polygon")
    points = [[float(p.split(",")[1]) for p in poly.attrib["points"].split()] for poly in polygons]
    assert points[0][:2] == points[1][2:]
    assert min(points[1]) == plots.TOP


def test_words_are_escaped_and_named() -> None:
    xs = np.array([0.0, 1.0])
    drawn = plots.lines({"<a & b>": (xs, xs), "c": (xs, xs)}, Axis("t"), Axis("v"), {"<SLO>": 0.5})
    tree = parsed(drawn)
    assert [item.tail for item in tree.iter("i")] == ["<a & b>", "c"]
    assert "<SLO>" in [text.text for text in tree.iter("text")]


@pytest.mark.parametrize("axis", [Axis("v"), Axis("v", log=True)])
def test_nothing_and_one_point_can_be_drawn(axis: Axis) -> None:
    none = np.zeros(0)
    assert parsed(plots.lines({"": (none, none)}, Axis("t"), axis)).find(".//path") is None
    one = np.array([3.0])
    assert parsed(plots.lines({"": (one, one)}, Axis("t"), axis)).find(".//path") is not None


def test_what_is_left_over_is_grey() -> None:
    drawn = plots.stacked(np.arange(2.0), {"kv": np.ones(2), "free": np.ones(2)}, Axis(), Axis())
    colours = [poly.attrib["class"] for poly in parsed(drawn).findall(".//polygon")]
    assert colours == ["area s0", f"area s{plots.NUM_COLOURS - 1}"]
