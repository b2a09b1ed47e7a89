"""The arena of each device: whose pages are what, since when and why, as figures and as pictures.

From what the dispatcher tells (gateway/dispatch/operator_handler.py) to rows. Models of one pack
are one row, under the first name, as workers tell it, with the other names beside it. Pictures are
strips to scale, and the last hour as bands, stretched by CSS. They hold no text, which would be
stretched too: names, sizes and kinds stand beside them, in the legend and in the table with the
same figures. Kinds are told apart by height as well as by shade: weights are tall, KV in use less
so, KV kept for reuse low.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from admin.rendering.model_colours import ModelColours
from admin.rendering.svg import element
from admin.rendering.templating import exact, number, path, size
from engine.protocol import Layout, ModelStatus
from gateway.dispatch.decisions import Move
from gateway.dispatch.operator_handler import FleetReport, Worker

ON_DEVICE = ("resident", "loading", "draining")
SPAN_S = 3600.0
STEP_S = 10.0
"""The last hour moves on in such steps, so that a picture in which nothing happens stays."""
MAX_BANDS = 16
MAX_ROWS = 200
KINDS = ("weights", "kv_live", "kv_kept")
WIDTH = 1000
STRIP_HEIGHT = 48
LAYOUT_HEIGHT = 12
BAND_HEIGHT = 26
STATE_HEIGHT = 16
LOADS_HEIGHT = 8
MINUTE_S = 60.0
OFTEN = 4
"""Loads in a minute from which on a model thrashes: then the band says how much of the minute it
was on the device, for the single stretches are too short to be seen."""
MAX_SEGMENTS = 32
"""Models of their own in a strip, and stops of the Tab key; the rest are one."""
MIN_WIDTH = 3.0
_GAP = 1.0
_KINDS = (("weights", 48.0, ""), ("kv_live", 34.0, " live"), ("kv_kept", 20.0, " kept"))


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model on a device. Pages by kind; `kv_tokens`: what its live KV would hold at most, None
    where nobody knows; `why`: what it was loaded for, "" where the dispatcher has not seen it;
    `others`: further names of the same pack."""

    name: str
    state: str
    reason: str
    weights: int
    kv_live: int
    kv_kept: int
    kv_tokens: int | None
    num_running: int
    since_at: float | None
    why: str
    others: tuple[str, ...] = ()

    @property
    def pages(self) -> int:
        """Of all kinds."""
        return self.weights + self.kv_live + self.kv_kept


@dataclass(frozen=True, slots=True)
class Arena:
    """One device. `rows`: the largest weights first, MAX_ROWS at most, `num_rows` of all; models
    that share a pack with a row have none of their own. `totals`: pages by kind, of all rows."""

    worker: str
    page_bytes: int
    num_pages: int
    free: int
    rows: list[ModelRow]
    num_rows: int
    layout: Layout | None
    totals: Mapping[str, int]

    def size(self, pages: int) -> int:
        """In bytes."""
        return pages * self.page_bytes

    def total(self, kind: str) -> int:
        """Pages of one kind, over all models."""
        return self.totals[kind]

    @property
    def taken(self) -> int:
        """Pages of all models."""
        return sum(self.totals.values())


@dataclass(frozen=True, slots=True)
class Stretch:
    """A model was in one state for a while, in seconds from the band's beginning."""

    from_s: float
    to_s: float
    state: str


@dataclass(frozen=True, slots=True)
class Band:
    """One model's last hour on a worker. `loads`, `evictions`: when, from the beginning; `known_s`:
    before that nothing is known."""

    worker: str
    model: str
    state: str
    stretches: list[Stretch]
    loads: list[float]
    evictions: list[float]
    known_s: float

    @property
    def minutes(self) -> list[int]:
        """Loads by minute, the oldest first."""
        counts = [0] * round(SPAN_S / MINUTE_S)
        for at_s in self.loads:
            counts[min(len(counts) - 1, int(at_s // MINUTE_S))] += 1
        return counts

    @property
    def most_loads(self) -> int:
        """In one minute."""
        return max(self.minutes)


def arenas(fleet: FleetReport, sharing: Mapping[str, Collection[str]] | None = None) -> list[Arena]:
    """Of the connected workers. `sharing`: by name, all names of the same pack."""
    return [_arena(worker, fleet, sharing or {}) for worker in fleet.workers]


def bands(fleet: FleetReport) -> tuple[list[Band], int]:
    """The last hour, by model and worker: what is or was on a device. Of more than MAX_BANDS those
    that moved most; and how many there are."""
    to_at = -(-fleet.at // STEP_S) * STEP_S
    from_at = to_at - SPAN_S
    moves: dict[tuple[str, str], list[Move]] = {}
    for move in fleet.moves:
        moves.setdefault((move.worker, move.model), []).append(move)
    now = {
        (worker.status.worker_id, row.model_id): row.state
        for worker in fleet.workers
        for row in worker.status.models
    }
    keys = [key for key, state in now.items() if state in ON_DEVICE]
    keys += [key for key in moves if key not in now or now[key] not in ON_DEVICE]
    keys = [key for key in keys if now.get(key) in ON_DEVICE or _was_there(moves[key])]
    keys.sort(key=lambda key: (-len(moves.get(key, ())), key[1], key[0]))
    shown = sorted(keys[:MAX_BANDS], key=lambda key: (now.get(key) not in ON_DEVICE, key[1], key))
    made = [
        _band(key, moves.get(key, []), now.get(key, "cold"), from_at, to_at, fleet.since_at)
        for key in shown
    ]
    return made, len(keys)


def _was_there(moves: list[Move]) -> bool:
    return any(m.state in ON_DEVICE or m.before in ON_DEVICE for m in moves)


def _band(
    key: tuple[str, str],
    moves: list[Move],
    state: str,
    from_at: float,
    to_at: float,
    since_at: float,
) -> Band:
    known_s = max(0.0, since_at - from_at)
    stretches, loads, evictions = [], [], []
    at_s, before = known_s, moves[0].before if moves else state
    if moves and moves[0].before == moves[0].state:
        before = "cold"  # found there by a dispatcher that had not heard of its worker
    for move in moves:
        then_s = min(SPAN_S, max(known_s, move.at - from_at))
        if then_s > at_s:
            stretches.append(Stretch(at_s, then_s, before))
        if move.at >= from_at:
            if move.state == "resident" and move.before in ("loading", "warm", "cold"):
                loads.append(then_s)
            elif move.before in ("resident", "draining") and move.state in ("warm", "cold"):
                evictions.append(then_s)
        at_s, before = then_s, move.state
    stretches.append(Stretch(at_s, to_at - from_at, state))
    worker, model = key
    return Band(worker, model, state, stretches, loads, evictions, known_s)


def _arena(worker: Worker, fleet: FleetReport, sharing: Mapping[str, Collection[str]]) -> Arena:
    status = worker.status
    by_kind: dict[str, dict[str, int]] = {}
    for owner, pages in status.pages.items():
        name, _, kind = owner.rpartition("/")
        if name:
            by_kind.setdefault(name, {})[kind] = pages
    models = {row.model_id: row for row in status.models}
    leases = {lease.model_id: lease for lease in status.leases}
    rows = []
    for name, kinds in by_kind.items():
        lease, model = leases.get(name), models.get(name)
        per_token = lease.kv_bytes_per_token if lease else 0
        live_bytes = kinds.get("kv", 0) * status.page_bytes
        states = lease.kv_bytes_per_sequence * model.num_running if lease and model else 0
        rows.append(
            _row(
                name,
                model,
                kinds,
                max(0, live_bytes - states) // per_token if per_token else None,
                worker.since,
                fleet,
                [
                    models[other]
                    for other in sharing.get(name, ())
                    if other in models and other not in by_kind
                ],
            )
        )
    rows.sort(key=lambda row: (-row.weights, -row.pages, row.name))
    return Arena(
        status.worker_id,
        status.page_bytes,
        status.num_pages,
        status.pages.get("free", 0),
        rows[:MAX_ROWS],
        len(rows),
        worker.layout,
        {kind: sum(int(getattr(row, kind)) for row in rows) for kind in KINDS},
    )


def _row(
    name: str,
    model: ModelStatus | None,
    kinds: Mapping[str, int],
    kv_tokens: int | None,
    since: Mapping[str, float],
    fleet: FleetReport,
    others: list[ModelStatus],
) -> ModelRow:
    loaded = fleet.loads.get(name)
    return ModelRow(
        name=name,
        state=model.state if model else "draining",
        reason=model.reason if model else "",
        weights=kinds.get("weights", 0),
        kv_live=max(0, kinds.get("kv", 0)),
        kv_kept=kinds.get("kv_cached", 0),
        kv_tokens=kv_tokens,
        num_running=sum(each.num_running for each in (model, *others) if each),
        since_at=since.get(name),
        why=loaded.reason if loaded else "",
        others=tuple(each.model_id for each in others),
    )


def description(row: ModelRow, arena: Arena) -> str:
    """All about one model's pages, in a line."""
    also = f" (also {', '.join(row.others)})" if row.others else ""
    parts = [f"{row.name}{also}: {row.state}"]
    if row.since_at is not None:
        parts[0] += f" since {exact(row.since_at)[11:]}"
    if row.why:
        parts.append(f"load reason: {row.why}")
    parts.append(f"weights {_amount(row.weights, arena)}")
    held = f" for up to {number(row.kv_tokens)} tokens" if row.kv_tokens else ""
    parts.append(f"KV in use {_amount(row.kv_live, arena)}{held}")
    parts.append(f"cached KV {_amount(row.kv_kept, arena)}")
    parts.append(f"running requests: {number(row.num_running)}")
    return "; ".join(parts)


def strip(arena: Arena, colours: ModelColours) -> Markup:
    """To scale: each model's pages by kind, then what is free."""
    parts = [element("rect", class_="fill-free", width=WIDTH, height=STRIP_HEIGHT)]
    scale = WIDTH / max(1, arena.num_pages)
    at = 0.0
    shown = [row for row in arena.rows if row.pages * scale >= MIN_WIDTH][:MAX_SEGMENTS]
    for row in shown:
        begin, rects = at, []
        for kind, tall, shade in _KINDS:
            wide = int(getattr(row, kind)) * scale
            if wide > 0:
                place = {"x": at, "y": STRIP_HEIGHT - tall, "width": max(0.5, wide - _GAP)}
                rects.append(
                    element("rect", class_=colours.fill(row.name) + shade, **place, height=tall)
                )
                at += wide
        if hatch := colours.hatch(row.name):
            lines, wide = f"url(#hatch{hatch})", max(0.5, row.weights * scale - _GAP)
            rects.append(element("rect", fill=lines, x=begin, width=wide, height=STRIP_HEIGHT))
        wide = max(0.5, at - begin - _GAP)
        rects.append(element("rect", class_="hit", x=begin, width=wide, height=STRIP_HEIGHT))
        busy = "" if row.state == "resident" else " moving"
        there = f"/admin/models/{path(row.name)}"
        parts.append(_segment(there, _id(arena, row.name), busy, description(row, arena), *rects))
    pages = arena.taken - sum(row.pages for row in shown)
    if pages:
        text = f"{arena.num_rows - len(shown)} more models: {_amount(pages, arena)}"
        wide = max(0.5, pages * scale - _GAP)
        rest = element("rect", class_="fill-rest", x=at, width=wide, height=STRIP_HEIGHT)
        parts.append(_segment("/admin/models?where=device", _id(arena, ""), "", text, rest))
    return _stretched("strip", f"Memory of {arena.worker} by model", STRIP_HEIGHT, parts, "group")


def layout(arena: Arena, colours: ModelColours) -> Markup:
    """As it lies, from the first page to the last; nothing where the worker has not said."""
    if arena.layout is None:
        return Markup("")
    scale = WIDTH / max(1, arena.num_pages)
    parts = [element("rect", class_="fill-free", width=WIDTH, height=LAYOUT_HEIGHT)]
    at = 0.0
    for index, pages in arena.layout.stretches:
        name, _, kind = arena.layout.owners[index].rpartition("/")
        wide = pages * scale
        if name:
            tall = LAYOUT_HEIGHT if kind == "weights" else LAYOUT_HEIGHT / 2
            place = {"x": at, "y": LAYOUT_HEIGHT - tall, "width": wide, "height": tall}
            parts.append(element("rect", class_=colours.fill(name), **place))
        at += wide
    said = f"Page layout of {arena.worker}, first page to last"
    return _stretched("lies", said, LAYOUT_HEIGHT, parts)


def band(line: Band, colours: ModelColours) -> Markup:
    """One model's last hour: tall while it is on the device, low while it is warm. Below that stand
    its loads of each minute; where there are many, the state is the minute's share on it."""
    loads, evictions = len(line.loads), len(line.evictions)
    text = f"{line.model} on {line.worker}: {line.state}; last hour: loads {loads}, "
    text += f"evictions {evictions}; at most {line.most_loads} loads per minute"
    parts = [
        element("title", text),
        element("rect", class_="ground", width=WIDTH, height=STATE_HEIGHT),
    ]
    if line.known_s > 0:
        wide = _x(line.known_s)
        parts.append(element("rect", class_="unknown", width=wide, height=STATE_HEIGHT))
    kind = colours.fill(line.model)
    drawn: set[tuple[str, int]] = set()
    for from_s, to_s, state in _seldom(line):
        tall = {"resident": 14, "draining": 14, "loading": 9, "warm": 4}.get(state, 0)
        at, wide = _x(from_s), _x(to_s) - _x(from_s)
        if tall and (wide >= 1 or _is_new(drawn, state, at)):
            shade = "" if state in ("resident", "draining") else " live"
            place = {"x": at, "y": STATE_HEIGHT - tall, "width": max(0.8, wide), "height": tall}
            parts.append(element("rect", class_=kind + shade, **place))
    most = max(OFTEN, line.most_loads)
    for minute, num in enumerate(line.minutes):
        at, wide = _x(minute * MINUTE_S), _x(MINUTE_S)
        if num >= OFTEN:
            share = 14 * _share(line, minute * MINUTE_S)
            place = {"x": at, "y": STATE_HEIGHT - share, "width": wide, "height": share}
            parts.append(element("rect", class_=kind, **place))
        if num:
            high = max(2.0, LOADS_HEIGHT * num / most)
            often = " often" if num >= OFTEN else ""
            place = {"x": at + 1, "y": BAND_HEIGHT - high, "width": wide - 2, "height": high}
            parts.append(element("rect", class_=f"loads{often}", **place))
    return _stretched("band", text, BAND_HEIGHT, parts)


def _seldom(line: Band) -> Iterator[tuple[float, float, str]]:
    """Stretches, without the minutes of many loads."""
    often = [minute * MINUTE_S for minute, num in enumerate(line.minutes) if num >= OFTEN]
    for each in line.stretches:
        at_s = each.from_s
        for begin_s in often:
            if at_s < begin_s < each.to_s:
                yield at_s, begin_s, each.state
            if begin_s < each.to_s:
                at_s = max(at_s, min(each.to_s, begin_s + MINUTE_S))
        if at_s < each.to_s:
            yield at_s, each.to_s, each.state


def _share(line: Band, begin_s: float) -> float:
    """How much of the known part of that minute the model was on the device."""
    here_s = known_s = 0.0
    for each in line.stretches:
        within_s = min(each.to_s, begin_s + MINUTE_S) - max(each.from_s, begin_s)
        if within_s > 0:
            known_s += within_s
            here_s += within_s if each.state in ("resident", "draining") else 0.0
    return here_s / known_s if known_s else 0.0


def _segment(there: str, name: str, busy: str, text: str, *rects: Markup) -> Markup:
    title = element("title", text)
    shown = {"id": name, "class_": f"seg{busy}", "aria_label": text}
    return element("a", title, *rects, href=there, **shown)


def _stretched(kind: str, name: str, height: int, parts: list[Markup], role: str = "img") -> Markup:
    box = {"viewBox": f"0 0 {WIDTH} {height}", "preserveAspectRatio": "none"}
    return element("svg", *parts, class_=kind, **box, role=role, aria_label=name)


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
