"""Pictures as SVG, made here: no script draws them, and each has a table with the same figures.

Colours come from classes (static/tables.css), so that both themes fit; a bar says what it is when
it is pointed at.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 880, 176
LEFT, TOP, BOTTOM = 40, 8, 24
NUM_LINES = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what it stands on, its value, of which `bad` is marked, and words for it."""

    label: str
    value: float
    bad: float
    title: str


def bars(rows: Sequence[Bar], name: str) -> Markup:
    """Bars side by side over a common scale. Every sixth has its label below, and the last."""
    top = _round_up(max((row.value for row in rows), default=0.0))
    inner = HEIGHT - TOP - BOTTOM
    step = (WIDTH - LEFT) / max(1, len(rows))
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, HEIGHT, name
        )
    ]
    for line in range(NUM_LINES + 1):
        value = top * line / NUM_LINES
        y = TOP + inner * (1 - line / NUM_LINES)
        shape = '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
        parts.append(Markup(shape).format(LEFT, WIDTH, y, y))
        shape = '<text x="{}" y="{:.1f}" text-anchor="end">{}</text>'
        parts.append(Markup(shape).format(LEFT - 8, y + 4, _short(value)))
    for index, row in enumerate(rows):
        x = LEFT + index * step
        parts.append(Markup("<g><title>{}</title>").format(row.title))
        hit = '<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="transparent"/>'
        parts.append(Markup(hit).format(x, TOP, step, inner))
        good = row.value - row.bad
        floor = float(TOP + inner)
        for kind, value in (("bar", good), ("bar bad", row.bad)):
            tall = inner * value / top if top else 0.0
            if tall > 0:
                floor -= tall
                shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
                parts.append(Markup(shape).format(kind, x + step * 0.15, floor, step * 0.7, tall))
        parts.append(Markup("</g>"))
        if (len(rows) - 1 - index) % 6 == 0:
            shape = '<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>'
            parts.append(Markup(shape).format(x + step / 2, HEIGHT - 6, row.label))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def hour_label(at: float) -> str:
    """The hour that begins then, in UTC."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%H:%M}"


def _round_up(value: float) -> float:
    """The next number that a scale may end with: 1, 2, 4 or 8 times a power of ten, or 4."""
    if value <= NUM_LINES:
        return float(NUM_LINES)
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(factor * power for factor in (1, 2, 4, 8, 10, 20) if factor * power >= value)


def _short(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
