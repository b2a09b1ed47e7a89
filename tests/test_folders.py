"""The rules on folders: one-way imports, narrow faces, and class names that mean one thing.

The rules are docs/architecture.md section 3; those on single files are test_layout.py's. A name of
a face may be a module: what that module defines is then open to outsiders, too.
"""

import ast
import graphlib
from functools import cache

import pytest

from tests.test_layout import PRODUCT, imports, sources

MAX_FACE_NAMES = 12
# Packages whose folders have no faces: `kernels` has no folders, and the migrations' one folder is
# Alembic's.
UNFACED = ("kernels", "migrations")


@cache
def import_graph() -> dict[str, set[str]]:
    """Modules of the product, each with those that it imports."""
    known = {file.module for file in sources() if file.room in PRODUCT}
    graph: dict[str, set[str]] = {}
    for file in sources():
        if file.room not in PRODUCT:
            continue
        # `from a.b import c` names a module only where c is one; otherwise it is a.b.
        names = {item.name for item in imports(file)}
        modules = {name if name in known else name.rpartition(".")[0] for name in names}
        graph[file.module] = (modules & known) - {file.module}
    return graph


def test_imports_form_no_circle() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()


def folder_graph(modules: dict[str, set[str]], packages: set[str]) -> dict[str, set[str]]:
    """Folders, and those that their modules import. A module in a package's root stands alone.

    `packages`: modules that are folders.
    """

    def node(module: str) -> str:
        return module if module in packages or module.count(".") < 2 else module.rpartition(".")[0]

    graph: dict[str, set[str]] = {}
    for module, imported in modules.items():
        found = graph.setdefault(node(module), set())
        found |= {node(name) for name in imported} - {node(module)}
    return graph


def test_folders_form_no_circle() -> None:
    packages = {file.module for file in sources() if file.path.endswith("/__init__.py")}
    graph = folder_graph(import_graph(), packages)
    graphlib.TopologicalSorter(graph).prepare()


def test_a_circle_of_folders_is_found() -> None:
    modules = {"a.x.one": {"a.y.two"}, "a.y.two": set(), "a.y.three": {"a.x.one"}}
    graphlib.TopologicalSorter(modules).prepare()  # the modules form none
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(folder_graph(modules, {"a.x", "a.y"})).prepare()


@cache
def faces() -> dict[str, tuple[str, ...]]:
    """Folders of the product, each with the names of its `__all__`."""
    found = {}
    for file in sources():
        if file.room in PRODUCT and file.path.endswith("/__init__.py"):
            named: tuple[str, ...] = ()
            for node in file.tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    named = tuple(ast.literal_eval(node.value))
            found[file.module] = named
    return found


def folder_below_package(module: str) -> str:
    """The folder directly under a package in which a module lies, or the module where none is."""
    first_two = ".".join(module.split(".")[:2])
    return first_two if first_two in faces() else module


def passed_by(importer: str, name: str) -> str | None:
    """The step of an imported name that is no part of its folder's face; None where all are."""
    folder = folder_below_package(name)
    if folder not in faces() or folder == folder_below_package(importer):
        return None
    for step in name[len(folder) + 1 :].split("."):
        if folder not in faces():
            return None  # inside a module that the face names
        if step not in faces()[folder]:
            return f"{folder}.{step}"
        folder = f"{folder}.{step}"
    return None


def test_outsiders_import_only_faces() -> None:
    violations = [
        file.at(item.node, f"{step} is no part of its folder's face (`__all__`)")
        for file in sources()
        if file.room in PRODUCT and file.room not in UNFACED
        for item in imports(file)
        if item.top in PRODUCT
        and item.top not in UNFACED
        and (step := passed_by(file.module, item.name)) is not None
    ]
    assert not violations, "\n" + "\n".join(violations)


def test_faces_are_narrow_and_say_what_their_folder_is_for() -> None:
    for file in sources():
        folder = file.module
        if file.room not in PRODUCT or folder not in faces() or file.room in UNFACED:
            continue
        assert len(faces()[folder]) <= MAX_FACE_NAMES, folder
        if folder.count("."):
            assert ast.get_docstring(file.tree), f"{folder} does not say what it is for"


def test_a_way_past_a_face_is_found() -> None:
    assert passed_by("gateway.limits.limits", "gateway.limits.unsynced_usage.UnsyncedUsage") is None
    inner = "gateway.limits.unsynced_usage"
    assert passed_by("gateway.server.supervisor", f"{inner}.UnsyncedUsage") == inner
    assert passed_by("gateway.server.supervisor", "gateway.limits.limits.Limiter") is None


def test_a_class_name_means_one_thing() -> None:
    for package in PRODUCT:
        found: dict[str, str] = {}
        for file in sources():
            if file.room != package:
                continue
            for node in file.tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    before = found.setdefault(node.name, file.path)
                    assert before == file.path, f"{node.name}: in {before} and {file.path}"
