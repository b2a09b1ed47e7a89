"""The arena drawn: strips to scale, and the last hour as bands. SVG made here, stretched by CSS.

No text inside: a picture as wide as its place would stretch it. Names, sizes and kinds stand beside
it, in the legend and in the table with the same figures. Kinds are told by height as well as by
shade: weights are tall, KV in use less so, KV kept for reuse low.
"""

import zlib

from markupsafe import Markup

from admin.arena import SPAN_S, Arena, Band, ModelRow
from admin.templating import exact, fill, hatch, number, path, size

WIDTH = 1000
STRIP_HEIGHT = 48
LAYOUT_HEIGHT = 12
BAND_HEIGHT = 16
MAX_SEGMENTS = 32
"""Models of their own in a strip, and stops of the Tab key; the rest are one."""
MIN_WIDTH = 3.0
_GAP = 1.0
_KINDS = (("weights", 48.0, ""), ("kv_live", 34.0, " live"), ("kv_kept", 20.0, " kept"))
_UNKNOWN = "unknown"


def told(row: ModelRow, arena: Arena) -> str:
    """All about one model's pages, in a line."""
    parts = [f"{row.name}: {row.state}"]
    if row.since_at is not None:
        parts[0] += f" since {exact(row.since_at)[11:]}"
    if row.why:
        parts.append(f"loaded because: {row.why}")
    parts.append(f"weights {_amount(row.weights, arena)}")
    held = f", room for {number(row.kv_tokens)} tokens" if row.kv_tokens else ""
    parts.append(f"KV in use {_amount(row.kv_live, arena)}{held}")
    parts.append(f"KV kept {_amount(row.kv_kept, arena)}")
    parts.append(f"{number(row.num_running)} running")
    return "; ".join(parts)


def strip(arena: Arena) -> Markup:
    """To scale: each model's pages by kind, then what is free."""
    parts = [
        Markup(
            '<svg class="strip" viewBox="0 0 {} {}" preserveAspectRatio="none" role="group"'
            ' aria-label="{}">'
        ).format(WIDTH, STRIP_HEIGHT, f"Memory of {arena.worker} by model"),
        Markup('<rect class="fill-free" width="{}" height="{}"/>').format(WIDTH, STRIP_HEIGHT),
    ]
    scale = WIDTH / max(1, arena.num_pages)
    at = 0.0
    shown = [row for row in arena.rows if row.pages * scale >= MIN_WIDTH][:MAX_SEGMENTS]
    for row in shown:
        text = told(row, arena)
        busy = "" if row.state == "resident" else " moving"
        shape = '<a href="/admin/models/{}" id="{}" class="seg{}" aria-label="{}"><title>{}</title>'
        parts.append(Markup(shape).format(path(row.name), _id(arena, row.name), busy, text, text))
        begin = at
        for kind, tall, shade in _KINDS:
            wide = int(getattr(row, kind)) * scale
            if wide > 0:
                parts.append(_rect(row.name, at, wide, tall, shade))
                at += wide
        if hatch(row.name):
            lines = '<rect fill="url(#hatch{})" x="{:.2f}" width="{:.2f}" height="{}"/>'
            wide = max(0.5, row.weights * scale - _GAP)
            parts.append(Markup(lines).format(hatch(row.name), begin, wide, STRIP_HEIGHT))
        hit = '<rect class="hit" x="{:.2f}" width="{:.2f}" height="{}"/></a>'
        parts.append(Markup(hit).format(begin, max(0.5, at - begin - _GAP), STRIP_HEIGHT))
    pages = arena.taken - sum(row.pages for row in shown)
    if pages:
        text = f"{arena.num_rows - len(shown)} more models: {_amount(pages, arena)}"
        wide = max(0.5, pages * scale - _GAP)
        parts.append(
            Markup(
                '<a href="/admin/models?where=device" id="{}" class="seg" aria-label="{}">'
                '<title>{}</title><rect class="fill-rest" x="{:.2f}" width="{:.2f}" height="{}"/>'
                "</a>"
            ).format(_id(arena, ""), text, text, at, wide, STRIP_HEIGHT)
        )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def layout(arena: Arena) -> Markup:
    """As it lies, from the first page to the last; nothing where the worker has not said."""
    if arena.layout is None:
        return Markup("")
    scale = WIDTH / max(1, arena.num_pages)
    parts = [
        Markup(
            '<svg class="lies" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
            ' aria-label="{}"><rect class="fill-free" width="{}" height="{}"/>'
        ).format(
            WIDTH,
            LAYOUT_HEIGHT,
            f"Where it lies in {arena.worker}, from the first page to the last",
            WIDTH,
            LAYOUT_HEIGHT,
        )
    ]
    at = 0.0
    for index, pages in arena.layout.stretches:
        name, _, kind = arena.layout.owners[index].rpartition("/")
        wide = pages * scale
        if name:
            tall = LAYOUT_HEIGHT if kind == "weights" else LAYOUT_HEIGHT / 2
            shape = '<rect class="{}" x="{:.2f}" y="{:g}" width="{:.2f}" height="{:g}"/>'
            place = (fill(name), at, LAYOUT_HEIGHT - tall, wide, tall)
            parts.append(Markup(shape).format(*place))
        at += wide
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def band(line: Band) -> Markup:
    """One model's last hour: tall while it is on the device, low while it is warm; a tick where it
    was loaded, and one where it left."""
    loads, evictions = len(line.loads), len(line.evictions)
    text = f"{line.model} on {line.worker}: {line.state}, in the last hour {loads} loads, "
    text += f"{evictions} times off the device"
    parts = [
        Markup(
            '<svg class="band" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
            ' aria-label="{}"><title>{}</title><rect class="ground" width="{}" height="{}"/>'
        ).format(WIDTH, BAND_HEIGHT, text, text, WIDTH, BAND_HEIGHT)
    ]
    if line.known_s > 0:
        shape = '<rect class="{}" width="{:.1f}" height="{}"/>'
        parts.append(Markup(shape).format(_UNKNOWN, _x(line.known_s), BAND_HEIGHT))
    drawn: set[tuple[str, int]] = set()
    for each in line.stretches:
        tall = {"resident": 12, "draining": 12, "loading": 8, "warm": 4}.get(each.state, 0)
        wide = _x(each.to_s) - _x(each.from_s)
        if tall and (wide >= 1 or _is_new(drawn, each.state, _x(each.from_s))):
            shade = "" if each.state in ("resident", "draining") else " live"
            shape = '<rect class="{}{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>'
            at, low = _x(each.from_s), BAND_HEIGHT - tall
            place = (fill(line.model), shade, at, low, max(0.8, wide), tall)
            parts.append(Markup(shape).format(*place))
    for kind, moments in (("tick-in", line.loads), ("tick-out", line.evictions)):
        for at in [_x(at_s) for at_s in moments]:
            if _is_new(drawn, kind, at):
                shape = '<rect class="{}" x="{:.1f}" width="1.6" height="{}"/>'
                parts.append(Markup(shape).format(kind, at, BAND_HEIGHT))
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _rect(name: str, at: float, wide: float, tall: float, shade: str) -> Markup:
    y = STRIP_HEIGHT - tall
    shape = '<rect class="{}{}" x="{:.2f}" y="{:g}" width="{:.2f}" height="{:g}"/>'
    return Markup(shape).format(fill(name), shade, at, y, max(0.5, wide - _GAP), tall)


def _id(arena: Arena, name: str) -> str:
    """Stays while the picture changes, so that who is there with the keyboard stays there."""
    return f"seg-{zlib.crc32(f'{arena.worker}/{name}'.encode()):08x}"


def _is_new(drawn: set[tuple[str, int]], kind: str, at: float) -> bool:
    """Whether nothing of this kind stands there: a thousand swaps in a minute are one column."""
    place = (kind, int(at))
    fresh = place not in drawn
    drawn.add(place)
    return fresh


def _x(seconds: float) -> float:
    return WIDTH * seconds / SPAN_S


def _amount(pages: int, arena: Arena) -> str:
    return f"{size(arena.size(pages))} ({number(pages)} pages)"
