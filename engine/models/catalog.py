"""Hosted names on one side, instances on the other: the only place that knows both.

An instance is what can be resident: one pack with its KV. Hosted models of one pack are one
instance, with one set of weights and one prefix cache. Residency, scheduler and pool speak of
instances only; requests come, and statuses go, under hosted names.

    instance pinned    if one of its names is
    instance's weight  the largest of its names', and so are its floors
    an unload     is followed unless another name is pinned or has unfinished requests

What belongs to the instance as a whole (pages, swaps) stands under its first name. An instance that
is no longer hosted keeps the names it had until its pages are back. Pure; owned by the engine.
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
    """Names and instances as of the last `update`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModelSpec] = {}
        self._instance_of: dict[str, str] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._instance_of_pack: dict[str, str] = {}

    def update(
        self, models: Sequence[ModelSpec], remains: Callable[[str], bool]
    ) -> list[ModelSpec]:
        """Take over the whole list; the instances that should be hosted, first names in order.

        `remains` says whether an instance still has something on the device: its id stays taken
        then.
        """
        self._specs = {spec.model_id: spec for spec in models}
        packs = {_folder(spec.pack_dir) for spec in self._specs.values()}
        for pack, instance_id in list(self._instance_of_pack.items()):
            if pack not in packs and not remains(instance_id):
                del self._instance_of_pack[pack]
                del self._names[instance_id]
        members: dict[str, list[ModelSpec]] = {}
        for spec in self._specs.values():
            members.setdefault(self._instance_for(_folder(spec.pack_dir)), []).append(spec)
        self._instance_of = {
            s.model_id: instance_id for instance_id, own in members.items() for s in own
        }
        for instance_id, own in members.items():
            self._names[instance_id] = _shared(tuple([spec.model_id for spec in own]))
        return [
            _shared(
                ModelSpec(
                    model_id=instance_id,
                    pack_dir=own[0].pack_dir,
                    pinned=any(spec.pinned for spec in own),
                    weight=max(spec.weight for spec in own),
                    floors=_floors(own),
                )
            )
            for instance_id, own in members.items()
        ]

    def instance_of(self, name: str) -> str:
        """The instance that serves a hosted model. Raises RequestRefused for an unknown one."""
        instance_id = self._instance_of.get(name)
        if instance_id is None:
            raise RequestRefused("unknown_model", f"unknown model {name!r}")
        return instance_id

    def names(self, instance_id: str) -> tuple[str, ...]:
        """The names it is hosted under now; none where it is on its way out."""
        names = self._names.get(instance_id, ())
        return tuple(name for name in names if self._instance_of.get(name) == instance_id)

    def label(self, instance_id: str) -> str:
        """The name under which what belongs to the whole instance is reported; its id once it is
        gone."""
        return self._names.get(instance_id, (instance_id,))[0]

    def may_unload(self, name: str, is_busy: Callable[[str], bool]) -> bool:
        """Whether the other names of the instance let it go; `is_busy` says who has requests."""
        others = [other for other in self.names(self.instance_of(name)) if other != name]
        return not any(self._specs[other].pinned or is_busy(other) for other in others)

    def status_rows(
        self, instances: Sequence[ModelStatus], num_requests: Mapping[str, tuple[int, int, int]]
    ) -> list[ModelStatus]:
        """A row for each hosted model, and for names on their way out.

        `num_requests`: running, waiting, and those of class batch of both, by hosted name.
        """
        rows = []
        for instance in instances:
            names = self.names(instance.model_id)
            leaving = [
                name for name in self._names[instance.model_id] if name not in self._instance_of
            ]
            for name in names or leaving:
                num_running, num_waiting, num_batch = num_requests.get(name, (0, 0, 0))
                row = msgspec.structs.replace(
                    instance,
                    model_id=name,
                    num_running=num_running,
                    num_waiting=num_waiting,
                    reason=self._in_names(instance.reason),
                    num_batch=num_batch,
                )
                rows.append(row)
        return rows

    def pages(self, by_instance: Mapping[tuple[str, str], int]) -> dict[str, int]:
        """Pages by (instance, kind) as "name/kind", an instance's under its first name."""
        pages: dict[str, int] = {}
        for (instance_id, kind), count in by_instance.items():
            key = f"{self.label(instance_id)}/{kind}"
            pages[key] = pages.get(key, 0) + count
        return pages

    def choice(self, choice: SwapChoice) -> SwapChoice:
        """A decision about instances under their first names."""
        return msgspec.structs.replace(
            choice,
            incoming=self.label(choice.incoming),
            candidates=[
                msgspec.structs.replace(row, model_id=self.label(row.model_id))
                for row in choice.candidates
            ],
        )

    def swap(self, record: SwapRecord) -> SwapRecord:
        """An instance's swap under its first name."""
        return msgspec.structs.replace(
            record, model_id=self.label(record.model_id), reason=self._in_names(record.reason)
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every name has one instance, which has it too."""
        for name, instance_id in self._instance_of.items():
            if name not in self._names[instance_id]:
                raise IntegrityError(f"instance {instance_id} does not know its name {name}")
        instances = list(self._instance_of_pack.values())
        if len(set(instances)) != len(instances) or set(instances) != set(self._names):
            raise IntegrityError(f"instances {instances} and names {self._names} do not agree")

    def _instance_for(self, pack: str) -> str:
        """The pack folder's name, made unique where another folder has it."""
        known = self._instance_of_pack.get(pack)
        if known is not None:
            return known
        name: str = _shared(os.path.basename(pack))  # `pack` is in its one spelling
        instance_id, number = name, 2
        while instance_id in self._names:
            instance_id = f"{name}~{number}"
            number += 1
        self._instance_of_pack[pack] = instance_id
        self._names[instance_id] = ()
        return instance_id

    def _in_names(self, reason: str) -> str:
        """Reasons that end in an instance ("room for X") speak of its first name."""
        text, _, last = reason.rpartition(" ")
        return f"{text} {self.label(last)}" if last in self._names else reason


def _floors(specs: Sequence[ModelSpec]) -> tuple[tuple[str, int], ...]:
    """Of all names of one instance: a tenant's largest."""
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
