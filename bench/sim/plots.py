"""Plots as SVG text: lines, stacked areas, bars. Nothing but the standard library and numpy.

Lives here: scales, ticks, paths, legends. Does not: what is plotted (timelines.py), the page and
its colours (page.css): a series takes the class `s0`, `s1`, ... and the page's style says what that
is in the light and in the dark. A value that is not a number breaks a line. Text is escaped here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from bench.sim.batches import Floats

WIDTH, HEIGHT = 560, 236
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 38
NUM_COLOURS = 8
REST = ("free", "others")
MOST_TICKS = 6

Series = Mapping[str, tuple[Floats, Floats]]


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale with its words. `log`: decades, for values above 0. No `low`, `high`: the data's."""

    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    text: Callable[[float], str] = lambda value: number(value)


def number(value: float) -> str:
    """Short, with k, M, G where large: 12.5k."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (bound if unit != 'k' else 1e3):.4g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def seconds(value: float) -> str:
    """A length of time: 250 ms, 12 s, 5 min, 3 h."""
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def short_seconds(value: float) -> str:
    """For a scale of decades: 20 ms, 500 s."""
    return f"{value:g} s" if value >= 1 else seconds(value)


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{value * 100:.3g} %"


def ticks(low: float, high: float) -> list[float]:
    """Round values within low..high, six at most: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(low: float, high: float) -> list[float]:
    """Round times: seconds, minutes or hours as the span asks."""
    span = high - low
    unit = 3600.0 if span >= 4 * 3600 else 60.0 if span >= 240 else 1.0
    return [tick * unit for tick in ticks(low / unit, high / unit)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; between few of them 2 and 5 times too."""
    factors = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors]
    inside = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    # Within less than a decade there may be none of them.
    return inside if len(inside) > 2 else ticks(low, high)


def lines(series: Series, x: Axis, y: Axis, marks: Mapping[str, float] | None = None) -> str:
    """A line each, in the colours of their order. `marks` are horizontal lines with a word."""
    marks = marks or {}
    frame = _Frame(
        _range(x, [xs for xs, _ in series.values()]),
        _range(y, [*(ys for _, ys in series.values()), np.array(list(marks.values()))]),
        x,
        y,
    )
    body = [frame.grid()]
    for word, value in marks.items():
        body.append(frame.mark(word, value))
    for place, (name, (xs, ys)) in enumerate(series.items()):
        points = _path(frame, xs, ys)
        if points:
            body.append(
                f'<path class="line s{place % NUM_COLOURS} d{place // NUM_COLOURS} '
                f'w{min(place, len(series) - 1, 3) if len(series) > 1 else 2}" d="{points}">'
                f"<title>{escape(name)}</title></path>"
            )
    return _svg(body, f"{y.label} over {x.label}") + legend(list(series))


def stacked(xs: Floats, layers: Mapping[str, Floats], x: Axis, y: Axis) -> str:
    """Areas on top of each other, the first at the bottom."""
    totals = np.cumsum(np.array([np.nan_to_num(layer) for layer in layers.values()]), axis=0)
    frame = _Frame(_range(x, [xs]), _range(y, [totals.ravel(), np.zeros(1)]), x, y)
    body = [frame.grid()]
    below = np.zeros(len(xs))
    for place, (name, upper) in enumerate(zip(layers, totals, strict=True)):
        across = [*zip(xs, upper, strict=True), *zip(xs[::-1], below[::-1], strict=True)]
        points = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in across)
        body.append(
            f'<polygon class="area s{_colour(place, name)}" points="{points}">'
            f"<title>{escape(name)}</title></polygon>"
        )
        below = upper
    return _svg(body, f"{y.label} over {x.label}") + legend(list(layers))


def _colour(place: int, name: str) -> int:
    """By place; what is left over is grey, the last of the colours."""
    return NUM_COLOURS - 1 if name in REST else place % NUM_COLOURS


def legend(names: Sequence[str]) -> str:
    """A swatch and a word each; nothing for a single unnamed series."""
    if names in ([], [""]):
        return ""
    items = "".join(
        f'<li><i class="swatch s{_colour(place, name)} d{place // NUM_COLOURS}"></i>'
        f"{escape(name)}</li>"
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


class _Frame:
    """From values to places in the picture."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], x: Axis, y: Axis) -> None:
        self._x_axis, self._y_axis = x, y
        (self.x_low, self.x_high), (self.y_low, self.y_high) = xs, ys

    def x(self, value: float) -> float:
        """From the left."""
        share = _share(value, self.x_low, self.x_high, self._x_axis.log)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """From the top."""
        share = _share(value, self.y_low, self.y_high, self._y_axis.log)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self, *, with_x: bool = True) -> str:
        """Lines, ticks and words of both axes."""
        found = []
        for value in _ticks(self._y_axis, self.y_low, self.y_high):
            top = self.y(value)
            found.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" '
                f'y2="{top:.1f}"/><text class="tick" x="{LEFT - 6}" y="{top + 3.5:.1f}" '
                f'text-anchor="end">{escape(self._y_axis.text(value))}</text>'
            )
        for value in _ticks(self._x_axis, self.x_low, self.x_high) if with_x else ():
            left = self.x(value)
            found.append(
                f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" '
                f'y2="{HEIGHT - BOTTOM}"/><text class="tick" x="{left:.1f}" '
                f'y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{escape(self._x_axis.text(value))}</text>"
            )
        found.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        )
        if self._x_axis.label and with_x:
            found.append(
                f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" '
                f'text-anchor="middle">{escape(self._x_axis.label)}</text>'
            )
        return "".join(found)

    def mark(self, word: str, value: float) -> str:
        """A horizontal line with its word."""
        top = self.y(value)
        return (
            f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
            f'<text class="tick" x="{WIDTH - RIGHT - 4}" y="{top - 4:.1f}" text-anchor="end">'
            f"{escape(word)}</text>"
        )


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = (math.log10(max(part, 1e-12)) for part in (value, low, high))
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _ticks(axis: Axis, low: float, high: float) -> list[float]:
    if axis.log:
        return log_ticks(low, high)
    return time_ticks(low, high) if axis.text is seconds else ticks(low, high)


def _range(axis: Axis, columns: Sequence[Floats]) -> tuple[float, float]:
    values = np.concatenate([np.asarray(column, np.float64) for column in columns] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    if axis.log:
        values = values[values > 0]
    if not len(values):
        values = np.array([1.0, 10.0] if axis.log else [0.0, 1.0])
    low = float(values.min()) if axis.low is None else axis.low
    high = float(values.max()) if axis.high is None else axis.high
    if axis.log:
        return (low, high) if high > low * 1.01 else (low / 2, high * 2)
    if high <= low:
        high = low + (abs(low) or 1.0)
    return low, high


def _path(frame: _Frame, xs: Floats, ys: Floats) -> str:
    parts, pen_up = [], True
    for a, b in zip(xs.tolist(), ys.tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{frame.x(a):.1f},{frame.y(b):.1f}")
        pen_up = False
    return "".join(parts)


def _svg(body: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )
