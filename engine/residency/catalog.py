"""Hosted names on one side, units on the other: the only place that knows both.

A unit is what can be resident: one pack with its KV. Hosted models of one pack are one unit, with
one set of weights and one prefix cache. Residency, scheduler and pool speak of units only; requests
come, and statuses go, under hosted names.

    unit pinned   if one of its names is
    unit's weight the largest of its names', and so are its floors
    an unload     is followed unless another name is pinned or has unfinished requests

What belongs to the unit as a whole (pages, swaps) stands under its first name. A unit that is no
longer hosted keeps the names it had until its pages are back. Pure; owned by the engine.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import IntegrityError, RequestRefused
from engine.protocol import ModelSpec, ModelStatus, SwapChoice, SwapRecord

T = TypeVar("T")


class Catalog:
    """Names and units as of the last `update`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModelSpec] = {}
        self._unit_of: dict[str, str] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._unit_of_pack: dict[str, str] = {}

    def update(
        self, models: Sequence[ModelSpec], remains: Callable[[str], bool]
    ) -> list[ModelSpec]:
        """Take over the whole list; the units that should be hosted, first names in order.

        `remains` says whether a unit still has something on the device: its id stays taken then.
        """
        self._specs = {spec.model_id: spec for spec in models}
        packs = {_folder(spec.pack_dir) for spec in self._specs.values()}
        for pack, unit_id in list(self._unit_of_pack.items()):
            if pack not in packs and not remains(unit_id):
                del self._unit_of_pack[pack]
                del self._names[unit_id]
        members: dict[str, list[ModelSpec]] = {}
        for spec in self._specs.values():
            members.setdefault(self._unit_for(_folder(spec.pack_dir)), []).append(spec)
        self._unit_of = {s.model_id: unit_id for unit_id, own in members.items() for s in own}
        for unit_id, own in members.items():
            self._names[unit_id] = _shared(tuple([spec.model_id for spec in own]))
        return [
            _shared(
                ModelSpec(
                    model_id=unit_id,
                    pack_dir=own[0].pack_dir,
                    pinned=any(spec.pinned for spec in own),
                    weight=max(spec.weight for spec in own),
                    floors=_floors(own),
                )
            )
            for unit_id, own in members.items()
        ]

    def unit(self, name: str) -> str:
        """The unit that serves a hosted model. Raises RequestRefused for an unknown one."""
        unit_id = self._unit_of.get(name)
        if unit_id is None:
            raise RequestRefused("unknown_model", f"model {name!r} is not in the catalog")
        return unit_id

    def names(self, unit_id: str) -> tuple[str, ...]:
        """The names it is hosted under now; none where it is on its way out."""
        names = self._names.get(unit_id, ())
        return tuple(name for name in names if self._unit_of.get(name) == unit_id)

    def label(self, unit_id: str) -> str:
        """The name under which what belongs to the whole unit is told; its id once it is gone."""
        return self._names.get(unit_id, (unit_id,))[0]

    def may_unload(self, name: str, is_busy: Callable[[str], bool]) -> bool:
        """Whether the other names of the unit let it go; `is_busy` says who has requests."""
        others = [other for other in self.names(self.unit(name)) if other != name]
        return not any(self._specs[other].pinned or is_busy(other) for other in others)

    def status_rows(
        self, units: Sequence[ModelStatus], num_requests: Mapping[str, tuple[int, int]]
    ) -> list[ModelStatus]:
        """A row for each hosted model, and for names on their way out.

        `num_requests`: running and waiting by hosted name.
        """
        rows = []
        for unit in units:
            names = self.names(unit.model_id)
            leaving = [name for name in self._names[unit.model_id] if name not in self._unit_of]
            for name in names or leaving:
                rows.append(self._row(unit, name, num_requests.get(name, (0, 0))))
        return rows

    def pages(self, by_unit: Mapping[tuple[str, str], int]) -> dict[str, int]:
        """Pages by (unit, kind) as "name/kind", a unit's under its first name."""
        pages: dict[str, int] = {}
        for (unit_id, kind), count in by_unit.items():
            key = f"{self.label(unit_id)}/{kind}"
            pages[key] = pages.get(key, 0) + count
        return pages

    def choice(self, choice: SwapChoice) -> SwapChoice:
        """A decision about units under their first names."""
        return msgspec.structs.replace(
            choice,
            newcomer=self.label(choice.newcomer),
            candidates=[
                msgspec.structs.replace(row, model_id=self.label(row.model_id))
                for row in choice.candidates
            ],
        )

    def swap(self, record: SwapRecord) -> SwapRecord:
        """A unit's swap under its first name."""
        return SwapRecord(
            model_id=self.label(record.model_id),
            kind=record.kind,
            tier=record.tier,
            size_bytes=record.size_bytes,
            duration_s=record.duration_s,
            reason=self._in_names(record.reason),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every name has one unit, which has it too."""
        for name, unit_id in self._unit_of.items():
            if name not in self._names[unit_id]:
                raise IntegrityError(f"unit {unit_id} does not know its name {name}")
        units = list(self._unit_of_pack.values())
        if len(set(units)) != len(units) or set(units) != set(self._names):
            raise IntegrityError(f"units {units} and names {self._names} do not agree")

    def _unit_for(self, pack: str) -> str:
        """The pack folder's name, made unique where another folder has it."""
        known = self._unit_of_pack.get(pack)
        if known is not None:
            return known
        name: str = _shared(os.path.basename(pack))  # `pack` is in its one spelling
        unit_id, number = name, 2
        while unit_id in self._names:
            unit_id = f"{name}~{number}"
            number += 1
        self._unit_of_pack[pack] = unit_id
        self._names[unit_id] = ()
        return unit_id

    def _row(self, unit: ModelStatus, name: str, num_requests: tuple[int, int]) -> ModelStatus:
        return ModelStatus(
            model_id=name,
            state=unit.state,
            weight_bytes=unit.weight_bytes,
            kv_bytes_used=unit.kv_bytes_used,
            num_running=num_requests[0],
            num_waiting=num_requests[1],
            load_s_estimate=unit.load_s_estimate,
            reason=self._in_names(unit.reason),
        )

    def _in_names(self, reason: str) -> str:
        """Reasons that end in a unit ("room for X") speak of its first name."""
        text, _, last = reason.rpartition(" ")
        return f"{text} {self.label(last)}" if last in self._names else reason


def _floors(specs: Sequence[ModelSpec]) -> tuple[tuple[str, int], ...]:
    """Of all names of one unit: a tenant's largest."""
    floors: dict[str, int] = {}
    for tenant_id, num_bytes in (floor for spec in specs for floor in spec.floors):
        floors[tenant_id] = max(num_bytes, floors.get(tenant_id, 0))
    return tuple(sorted(floors.items()))


@functools.lru_cache(maxsize=1 << 16)
def _folder(pack_dir: str) -> str:
    """One spelling of a folder."""
    return str(Path(pack_dir))


@functools.lru_cache(maxsize=1 << 16)
def _shared(value: T) -> T:
    """The first of equal values: a simulation has thousands of catalogs of thousands of models."""
    return value
