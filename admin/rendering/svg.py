"""SVG made on the server: elements, and bars over a common scale.

No script draws a picture, and each has a table with the same figures. Colours come from classes
(static/tables.css), so that both themes fit; a bar says what it is when it is pointed at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

HEIGHT = 176
LEFT, TOP, BOTTOM = 40, 8, 24
NUM_LINES = 4
AXIS_STEP = 16
MANY_BARS = 12


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """`class_` is `class` and `text_anchor` is `text-anchor`; floats have two digits at most."""
    shown = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = "".join(str(escape(child)) for child in children)
    return Markup(f"<{tag}{shown}>{inner}</{tag}>" if inner else f"<{tag}{shown}/>")


def picture(kind: str, name: str, width: int, height: int, *children: str) -> Markup:
    """A picture that assistive technology names; `kind`: its class."""
    return element(
        *("svg", *children),
        class_=kind, viewBox=f"0 0 {width} {height}", role="img", aria_label=name,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what stands below it, (class, value) of its parts from below, and words for it."""

    label: str
    parts: Sequence[tuple[str, float]]
    title: str


def bar_chart(
    bars: Sequence[Bar],
    name: str,
    top: float,
    scale: Callable[[float], str],
    label_every: int,
    left: int = LEFT,
    line: tuple[float, str] | None = None,
) -> Markup:
    """Bars side by side up to `top`, the last one labelled; `line`: a level and words for it.

    As wide as there is room: across in percent, up in pixels, so that letters keep their size. The
    scale stands `left` pixels beside it (a class, in steps of AXIS_STEP).
    """
    inner, step = HEIGHT - TOP - BOTTOM, 100 / max(1, len(bars))
    parts: list[Markup] = []
    for number in range(NUM_LINES + 1):
        y = TOP + inner * (1 - number / NUM_LINES)
        parts.append(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        said = scale(top * number / NUM_LINES)
        parts.append(element("text", said, x=-8, y=y + 4, text_anchor="end"))
    labels: list[Markup] = []
    for index, bar in enumerate(bars):
        x, floor = index * step, float(TOP + inner)
        column = {"x": _percent(x), "width": _percent(step)}
        rects = [element("rect", class_="column", **column, y=TOP, height=inner)]
        for kind, value in bar.parts:
            tall = inner * value / top if top else 0.0
            if tall > 0:
                floor -= tall
                place = {"x": _percent(x + step * 0.15), "width": _percent(step * 0.7)}
                rects.append(element("rect", class_=kind, **place, y=floor, height=tall))
        parts.append(element("g", element("title", bar.title), *rects))
        after = len(bars) - 1 - index
        if after % label_every == 0:
            is_cut = not after and len(bars) > MANY_BARS  # half of it would be outside
            at, anchor = (100.0, "end") if is_cut else (x + step / 2, "middle")
            sparse = "sparse" if after // label_every % 2 else None
            below = {"x": _percent(at), "y": HEIGHT - 6, "text_anchor": anchor}
            labels.append(element("text", bar.label, class_=sparse, **below))
    parts += labels
    if line is not None:
        y, title = TOP + inner * (1 - line[0] / top), element("title", line[1])
        parts.append(element("line", title, class_="budget", x1=0, x2="100%", y1=y, y2=y))
        beside = y - 4 if y > TOP + 12 else y + 12
        parts.append(element("text", line[1], class_="budget-text", x=4, y=beside))
    axis = f"chart axis-{-(-left // AXIS_STEP)}"
    return element("svg", *parts, class_=axis, height=HEIGHT, role="img", aria_label=name)


def _percent(share: float) -> str:
    return f"{share:.3f}".rstrip("0").rstrip(".") + "%"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(escape(value))
