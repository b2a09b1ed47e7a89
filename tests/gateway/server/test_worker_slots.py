"""Which workers a machine runs: devices, cores and memory each gets, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.server.worker_slots import Machine, NoSuchWorkers, WorkerSlot, plan_slots
from gateway.settings.worker_settings import WorkerSpec

SMALL = Machine([[(0,), (1,)]])
TWO_SOCKETS = Machine([[(n, n + 16) for n in range(8)], [(n, n + 16) for n in range(8, 16)]])


def gpus(count: int) -> Machine:
    return Machine(SMALL.nodes, [f"cuda:{number}" for number in range(count)])


def names(slots: list[WorkerSlot]) -> list[str]:
    return [slot.device for slot in slots]


def test_one_worker_goes_where_the_system_puts_it() -> None:
    (slot,) = plan_slots([], 0, "cpu", SMALL)
    assert slot == WorkerSlot("worker-0", "cpu")
    (slot,) = plan_slots([], 1, "cpu", TWO_SOCKETS)
    assert slot.cpus == ()


def test_a_worker_for_each_node_keeps_to_its_node() -> None:
    slots = plan_slots([], 0, "cpu", TWO_SOCKETS)
    assert [slot.worker_id for slot in slots] == ["worker-0", "worker-1"]
    assert slots[0].cpus == (*range(8), *range(16, 24))
    assert slots[1].cpus == (*range(8, 16), *range(24, 32))
    assert {(slot.num_workers, slot.num_in_memory) for slot in slots} == {(2, 2)}


def test_the_threads_of_a_core_stay_together() -> None:
    first, second = plan_slots([], 2, "cpu", Machine([TWO_SOCKETS.nodes[0]]))
    assert first.cpus == (0, 1, 2, 3, 16, 17, 18, 19)
    assert second.cpus == (4, 5, 6, 7, 20, 21, 22, 23)


def test_fewer_workers_than_nodes_take_whole_nodes_and_all_of_them() -> None:
    nodes = [[(n,) for n in range(first, first + 4)] for first in (0, 4, 8, 12)]
    slots = plan_slots([], 2, "cpu", Machine(nodes))
    assert [len(slot.cpus) for slot in slots] == [8, 8]
    assert [len({cpu // 4 for cpu in slot.cpus}) for slot in slots] == [2, 2]


def test_more_workers_than_cores_keep_to_none() -> None:
    slots = plan_slots([], 4, "cpu", SMALL)
    assert [slot.cpus for slot in slots] == [()] * 4
    assert {slot.num_workers for slot in slots} == {4}


def test_auto_is_every_gpu_or_the_processor() -> None:
    assert names(plan_slots([], 0, "auto", gpus(3))) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names(plan_slots([], 2, "auto", gpus(3))) == ["cuda:0", "cuda:1"]
    assert names(plan_slots([], 0, "auto", gpus(0))) == ["cpu"]
    assert names(plan_slots([], 0, "cuda:1", Machine(SMALL.nodes))) == ["cuda:1"]
    (slot,) = plan_slots([], 1, "auto", gpus(1))
    assert slot.num_in_memory == 1


def test_tables_say_what_each_has() -> None:
    specs = [
        WorkerSpec(device="cuda:1", memory_bytes=1 << 30, labels=("big",)),
        WorkerSpec(device="auto"),
        WorkerSpec(device="cpu", threads=3),
    ]
    big, other, processor = plan_slots(specs, 0, "cpu", gpus(2))
    assert (big.device, big.memory_bytes, big.labels) == ("cuda:1", 1 << 30, ("big",))
    assert other.device == "cuda:0"
    assert (processor.device, processor.threads, processor.cpus) == ("cpu", 3, ())
    assert (processor.num_workers, processor.num_in_memory) == (3, 1)


@pytest.mark.parametrize(
    ("specs", "num_workers", "device", "said"),
    [
        ([WorkerSpec()], 2, "cpu", "num_workers is 2"),
        ([], 3, "auto", "has 2 GPUs"),
        ([], 2, "cuda:0", "2 workers are to use cuda:0"),
        ([WorkerSpec(device="cuda:1"), WorkerSpec(device="cuda:1")], 0, "cpu", "cuda:1"),
    ],
)
def test_what_cannot_be_had_is_said(
    specs: list[WorkerSpec], num_workers: int, device: str, said: str
) -> None:
    with pytest.raises(NoSuchWorkers, match=said):
        plan_slots(specs, num_workers, device, gpus(2))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 2))
def test_cores_are_divided_whole_and_once(sizes: list[int], count: int, threads: int) -> None:
    numbers = iter(range(1000))
    nodes = [[tuple(next(numbers) for _ in range(threads)) for _ in range(s)] for s in sizes]
    slots = plan_slots([], count, "cpu", Machine(nodes))
    assert len(slots) == count
    held = [cpu for slot in slots for cpu in slot.cpus]
    assert len(held) == len(set(held))
    if 2 <= count <= sum(sizes):
        assert sorted(held) == list(range(sum(sizes) * threads))
        for slot in slots:
            assert slot.cpus
            for node in nodes:
                for core in node:
                    assert set(core) <= set(slot.cpus) or not set(core) & set(slot.cpus)
    else:
        assert not held


def test_workers_of_other_machines_take_nothing_of_this_one() -> None:
    far = WorkerSpec(endpoint="tcp://10.0.0.5:7600", public_key="k" * 40, labels=("rack 2",))
    slots = plan_slots([far, WorkerSpec(), WorkerSpec()], 0, "cpu", Machine([TWO_SOCKETS.nodes[0]]))
    assert slots[0] == WorkerSlot(
        "worker-0", "", labels=("rack 2",), endpoint=far.endpoint, public_key=far.public_key
    )
    assert slots[1:] == plan_slots_named(["worker-1", "worker-2"])
    assert plan_slots([far], 0, "auto", gpus(2)) == slots[:1]


def test_workers_have_names_of_their_own_or_by_their_places() -> None:
    specs = [WorkerSpec(), WorkerSpec(name="rack-2"), WorkerSpec()]
    slots = plan_slots(specs, 0, "cpu", SMALL)
    assert [slot.worker_id for slot in slots] == ["worker-0", "rack-2", "worker-2"]


def plan_slots_named(names: list[str]) -> list[WorkerSlot]:
    """As without workers of other machines, under other names."""
    alone = plan_slots([], len(names), "cpu", Machine([TWO_SOCKETS.nodes[0]]))
    return [replace(slot, worker_id=name) for slot, name in zip(alone, names, strict=True)]
