"""Money by day or hour as stacked bars, SVG made here; the table beside it has the same figures."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from admin.charts import BOTTOM, HEIGHT, LEFT, NUM_LINES, TOP, WIDTH

MAX_LABELS = 8
NANOS = 10**9


@dataclass(frozen=True, slots=True)
class Stack:
    """One part of every bar. `kind`: its class, which has its colour."""

    name: str
    kind: str
    costs: Sequence[int]


def stacked(labels: Sequence[str], stacks: Sequence[Stack], name: str, currency: str) -> Markup:
    """Bars side by side over a common scale, each of the stacks' costs (nano-units)."""
    sums = [sum(max(0, stack.costs[n]) for stack in stacks) for n in range(len(labels))]
    top = round_up(max(sums, default=0))
    inner, left = HEIGHT - TOP - BOTTOM, LEFT + 16
    step = (WIDTH - left) / max(1, len(labels))
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, HEIGHT, name
        )
    ]
    for line in range(NUM_LINES + 1):
        y = TOP + inner * (1 - line / NUM_LINES)
        shape = '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
        parts.append(Markup(shape).format(left, WIDTH, y, y))
        shape = '<text x="{}" y="{:.1f}" text-anchor="end">{:g}</text>'
        parts.append(Markup(shape).format(left - 8, y + 4, top * line / NUM_LINES / NANOS))
    every = -(-len(labels) // MAX_LABELS)
    for index, label in enumerate(labels):
        x, floor = left + index * step, float(TOP + inner)
        told = [f"{label}: {currency} {sums[index] / NANOS:,.4f}"]
        told += [
            f"{stack.name}: {currency} {stack.costs[index] / NANOS:,.4f}"
            for stack in stacks
            if stack.costs[index] and len(stacks) > 1
        ]
        parts.append(Markup("<g><title>{}</title>").format("\n".join(told)))
        hit = '<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="transparent"/>'
        parts.append(Markup(hit).format(x, TOP, step, inner))
        for stack in stacks:
            tall = inner * max(0, stack.costs[index]) / top
            if tall > 0:
                floor -= tall
                shape = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
                place = (stack.kind, x + step * 0.15, floor, step * 0.7, tall)
                parts.append(Markup(shape).format(*place))
        parts.append(Markup("</g>"))
        if (len(labels) - 1 - index) % every == 0:
            shape = '<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>'
            parts.append(Markup(shape).format(x + step / 2, HEIGHT - 6, label))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def round_up(nanos: int) -> int:
    """The next sum that a scale may end with: 1, 2, 4, 8 or 10 times a power of ten."""
    power: int = 10 ** max(0, len(str(max(1, nanos))) - 1)
    return max(4, next(f * power for f in (1, 2, 4, 8, 10) if f * power >= nanos))
