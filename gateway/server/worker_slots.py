"""Which workers this machine runs, and what part of it each gets (pure).

A worker that is listed with an endpoint runs on another machine, which decides what it gets.

Without `[[workers]]` their number is `num_workers`, and 0 chooses: on GPUs one each, on processors
one a NUMA node, for a model that is read by the cores of one node from the memory of another runs
at the speed of the link between them. A GPU has one worker: two would each take all of its memory.

Cores. Workers of processors that are not alone keep to cores of their own, whole ones (two threads
of a core are one core's speed), beside one another on a node. Where a machine has fewer cores than
workers nobody keeps to any. A worker that is alone goes where the system puts it.

Memory. What is chosen for one worker of a processor is divided by all of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gateway.ipc.machine import Core
from gateway.settings.worker_settings import WorkerSpec, worker_names
from registry.errors import RegistryError


@dataclass(frozen=True, slots=True)
class Machine:
    """`nodes`: the cores of each NUMA node that this process may use. `gpus`: names of devices, or
    none because no setting asks for `auto`."""

    nodes: Sequence[Sequence[Core]]
    gpus: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One worker. `cpus`: what it keeps to; empty: to nothing. `num_workers`: of the machine;
    `num_in_memory`: those that take their arenas out of main memory, at least 1."""

    worker_id: str
    device: str
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    threads: int = 0
    labels: tuple[str, ...] = ()
    num_workers: int = 1
    num_in_memory: int = 1
    endpoint: str = ""
    """Where it listens, if it is not as `LocalHomes` chooses it."""
    public_key: str = ""
    """Of the other machine that has it."""


class NoSuchWorkers(RegistryError):
    """What is asked for cannot be had on this machine; the message says what to change."""


def plan_slots(
    specs: Sequence[WorkerSpec], num_workers: int, device: str, machine: Machine
) -> list[WorkerSlot]:
    """`device`, `num_workers`: the settings. Raises NoSuchWorkers."""
    if specs and num_workers not in (0, len(specs)):
        raise NoSuchWorkers(
            f"num_workers is {num_workers}, and polyhost.toml lists {len(specs)} workers: "
            "remove one of the two settings"
        )
    wanted = list(specs) or [WorkerSpec()] * (num_workers or _chosen(device, machine))
    named = list(zip(worker_names(wanted), wanted, strict=True))
    here = iter(_here([each for each in named if not each[1].endpoint], device, machine))
    return [_elsewhere(name, spec) if spec.endpoint else next(here) for name, spec in named]


def _here(
    named: Sequence[tuple[str, WorkerSpec]], device: str, machine: Machine
) -> list[WorkerSlot]:
    """The workers of this machine. Raises NoSuchWorkers."""
    devices = _devices([spec.device or device for _, spec in named], machine)
    _check_alone(devices)
    on_cpu = [index for index, name in enumerate(devices) if name == "cpu"]
    cpus = dict(zip(on_cpu, _parts(machine.nodes, len(on_cpu)), strict=True))
    return [
        WorkerSlot(
            worker_id,
            devices[index],
            cpus.get(index, ()),
            spec.memory_bytes,
            spec.threads,
            spec.labels,
            num_workers=len(named),
            num_in_memory=max(1, len(on_cpu)),
        )
        for index, (worker_id, spec) in enumerate(named)
    ]


def _elsewhere(worker_id: str, spec: WorkerSpec) -> WorkerSlot:
    return WorkerSlot(
        worker_id, "", labels=spec.labels, endpoint=spec.endpoint, public_key=spec.public_key
    )


def _chosen(device: str, machine: Machine) -> int:
    if device == "auto" and machine.gpus:
        return len(machine.gpus)
    return max(1, len(machine.nodes)) if device in ("auto", "cpu") else 1


def _devices(names: Sequence[str], machine: Machine) -> list[str]:
    """`auto` becomes the next GPU that nobody names, or where the machine has none, the CPU."""
    if not machine.gpus:
        return ["cpu" if name == "auto" else name for name in names]
    free = [gpu for gpu in machine.gpus if gpu not in names]
    if names.count("auto") > len(free):
        raise NoSuchWorkers(
            f"{len(names)} workers are asked for, and this machine has {len(machine.gpus)} GPUs: "
            "lower num_workers, or list fewer [[workers]]"
        )
    return [free.pop(0) if name == "auto" else name for name in names]


def _check_alone(devices: Sequence[str]) -> None:
    for name, count in Counter(devices).items():
        if count > 1 and name != "cpu":
            raise NoSuchWorkers(
                f"{count} workers are to use {name}, and each would take all of its memory: give "
                "each a device of its own, or set device to auto"
            )


def _parts(nodes: Sequence[Sequence[Core]], count: int) -> list[tuple[int, ...]]:
    """The logical processors of each of `count` workers; empty ones where they do not go round."""
    if count < 2 or count > sum(map(len, nodes)):
        return [()] * count
    if count < len(nodes):
        joined: list[list[Core]] = [[] for _ in range(count)]
        for cores in sorted(nodes, key=len, reverse=True):
            min(joined, key=len).extend(cores)
        return [_cpus(cores) for cores in joined]
    shares = [1] * len(nodes)
    for _ in range(count - len(nodes)):  # to the node that has most cores for one more
        most = max(range(len(nodes)), key=lambda n: (len(nodes[n]) / (shares[n] + 1), -n))
        shares[most] += 1
    parts = []
    for cores, share in zip(nodes, shares, strict=True):
        bounds = [len(cores) * place // share for place in range(share + 1)]
        parts += [_cpus(cores[first:last]) for first, last in pairwise(bounds)]
    return parts


def _cpus(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))
