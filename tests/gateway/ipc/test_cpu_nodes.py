"""The cores of a machine, read from files that look like Linux's."""

from pathlib import Path

from gateway.ipc.machine import cpu_nodes


def write_system(folder: Path, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, cpus in nodes.items():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for cpu, threads in siblings.items():
        (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{threads}\n")
    return folder


def test_nodes_have_cores_and_cores_their_threads(tmp_path: Path) -> None:
    threads = {0: "0,4", 1: "1,5", 2: "2-2", 3: "3", 4: "0,4", 5: "1,5"}
    system = write_system(tmp_path, {10: "2-3", 2: "0-1,4-5"}, threads)
    assert cpu_nodes(system, set(range(6))) == [[(0, 4), (1, 5)], [(2,), (3,)]]


def test_only_what_this_process_may_use_counts(tmp_path: Path) -> None:
    system = write_system(tmp_path, {0: "0-3", 1: "4-7", 2: ""}, {1: "1,2", 2: "1,2"})
    assert cpu_nodes(system, {2, 3}) == [[(2,), (3,)]]


def test_a_system_that_says_nothing_is_one_node(tmp_path: Path) -> None:
    assert cpu_nodes(tmp_path, {1, 3}) == [[(1,), (3,)]]


def test_this_machine_has_cores_of_its_own() -> None:
    assert cpu_nodes()[0][0]
