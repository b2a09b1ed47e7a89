"""The rules of the house, checked on the sources: imports, pure policies, sizes, docstrings.

Every rule returns its violations as `path:line: reason`, so that one run shows them all. The rules
are docs/architecture.md section 3; where a rule has to give way, the design page changes with it.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("gateway", "engine", "kernels", "registry", "migrations", "admin")
PACKAGES = (*PRODUCT, "bench", "tests")

MAX_PRODUCT_LINES = 500
MAX_TEST_LINES = 600
MIN_PRODUCT_LINES = 40
MAX_FUNCTION_LINES = 70
MAX_KERNEL_LINES = 150  # a Triton kernel cannot be cut where its registers are shared

# What a room may import beside the standard library and itself; a dotted name allows that part.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "kernels": frozenset({"torch", "triton", "numpy"}),
    "engine": frozenset(
        {
            "huggingface_hub",
            "kernels",
            "llguidance",
            "msgspec",
            "numpy",
            "safetensors",
            "tokenizers",
            "torch",
            "transformers",
            "xxhash",
            "zmq",
        }
    ),
    "registry": frozenset({"alembic", "argon2", "sqlalchemy"}),
    "migrations": frozenset({"alembic", "sqlalchemy", "registry"}),
    "gateway": frozenset(
        {
            "admin",
            "cachetools",
            "cryptography",
            "engine.objects",
            "engine.protocol",
            "jinja2",
            "msgspec",
            "numpy",
            "prometheus_client",
            "python_multipart",
            "redis",
            "registry",
            "sqlalchemy",
            "starlette",
            "tokenizers",
            "uvicorn",
            "uvloop",
            "xxhash",
            "zmq",
        }
    ),
    "admin": frozenset(
        {
            "engine.objects",
            "engine.protocol",
            "gateway",
            "jinja2",
            "markupsafe",
            "msgspec",
            "numpy",
            "prometheus_client",
            "registry",
            "sqlalchemy",
            "starlette",
            "uvloop",
        }
    ),
}

# Files that are short for a reason.
SHORT_FILES = frozenset(
    {
        "gateway/__main__.py",  # an entry point
        "migrations/env.py",  # Alembic's
    }
)

# Who alone may import what; of gateway, only these modules and folders know the operators' side.
ONLY_FOR: dict[str, tuple[str, ...]] = {
    "admin": ("admin/", "gateway/server/", "gateway/__main__.py"),
    "gateway.server": ("gateway/server/", "admin/cli/"),
}

# A library that has one home inside its room.
ONE_HOME: dict[str, tuple[str, ...]] = {
    "starlette": ("gateway/http/", "admin/"),
    "redis": ("gateway/redis/", "gateway/cache/redis_link.py"),
    "python_multipart": ("gateway/files/",),
    "triton": ("kernels/",),
    "huggingface_hub": ("engine/registration/hub.py",),
    "argon2": ("registry/accounts/users.py",),
    "cryptography": ("gateway/sealing/seals.py",),
}

# Shared by engine, gateway and admin: the standard library alone.
LEAVES = ("engine.objects",)

# A policy decides from what it is given: data structures and arithmetic, nothing that acts.
POLICY_MAY_IMPORT = frozenset(
    {
        "array",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "re",
        "statistics",
        "types",
        "typing",
    }
)
# Who may name the GPU's library: the backend, its face, who opens it, and the kernels.
CUDA_HOMES = (
    "kernels/",
    "engine/backend/__init__.py",
    "engine/backend/cuda",
    "engine/worker/open_device.py",
)
# Frozen data without behaviour, so that a policy can speak of Limits and of roles.
POLICY_NOUNS = ("gateway.types", "gateway.settings.oidc_settings")
POLICY_NEVER_CALLS = frozenset({"open", "print", "input", "eval", "exec", "compile", "breakpoint"})


@dataclass(frozen=True)
class Source:
    """One Python file of the tree."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree: every rule looks through them."""
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The top-level package."""
        return self.path.split("/")[0]

    @property
    def module(self) -> str:
        """The dotted name it is imported by."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_policy(self) -> bool:
        """Whether the pure rules hold."""
        return "/policy/" in self.path

    def at(self, node: ast.AST, reason: str) -> str:
        """A violation in words."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {reason}"


@dataclass(frozen=True)
class Import:
    """One imported name, fully dotted: `from a.b import c` gives `a.b.c`."""

    name: str
    node: ast.stmt

    @property
    def top(self) -> str:
        """The distribution or package it comes from."""
        return self.name.split(".")[0]

    def within(self, allowed: str) -> bool:
        """Whether the name is `allowed` or lies inside it."""
        return self.name == allowed or self.name.startswith(allowed + ".")


Rule = Callable[[Source], Iterator[str]]


def source(path: str, text: str) -> Source:
    """A source from its text, as if it stood at `path`."""
    return Source(path, text, ast.parse(text, path))


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(
        source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    )


def imports(file: Source) -> Iterator[Import]:
    """All imports of a file, in functions and under `if TYPE_CHECKING` too."""
    for node in file.nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = file.path.removesuffix(".py").split("/")[: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (Import(f"{base}.{alias.name}", node) for alias in node.names)


def functions(file: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a file."""
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def rule_rooms(file: Source) -> Iterator[str]:
    """A room imports the standard library, itself, and what its row of MAY_IMPORT names."""
    allowed = MAY_IMPORT.get(file.room)
    if allowed is None:
        return
    for item in imports(file):
        if item.top == file.room or item.top in sys.stdlib_module_names:
            continue
        if not any(item.within(name) for name in allowed):
            yield file.at(item.node, f"{file.room} may not import {item.name}")


def rule_one_home(file: Source) -> Iterator[str]:
    """Libraries that belong to an edge appear only there."""
    if file.room not in PRODUCT:
        return
    for item in imports(file):
        home = ONE_HOME.get(item.top)
        if home is not None and not file.path.startswith(home):
            yield file.at(item.node, f"{item.top} is for {', '.join(home)}")


def rule_only_for(file: Source) -> Iterator[str]:
    """The tenants' request path knows nothing of operators, and only the CLI starts a server."""
    if file.room not in PRODUCT:
        return
    for item in imports(file):
        for name, importers in ONLY_FOR.items():
            if item.within(name) and not file.path.startswith(importers):
                yield file.at(item.node, f"only {', '.join(importers)} may import {name}")


def rule_leaves_import_the_standard_library(file: Source) -> Iterator[str]:
    """What engine, gateway and admin share needs nothing that one of them may not have."""
    leaf = next((leaf for leaf in LEAVES if file.path.startswith(leaf.replace(".", "/"))), None)
    if leaf is None:
        return
    for item in imports(file):
        if item.top not in sys.stdlib_module_names and not item.within(leaf):
            yield file.at(item.node, f"{leaf} may not import {item.name}")


def rule_policies_import_nothing_that_acts(file: Source) -> Iterator[str]:
    """A policy imports pure parts of the standard library, nouns, and policies of its room."""
    if not file.is_policy or file.room not in PRODUCT:
        return
    for item in imports(file):
        is_policy = item.top == file.room and ".policy." in item.name
        is_noun = any(item.within(name) for name in POLICY_NOUNS)
        if item.top not in POLICY_MAY_IMPORT and not is_policy and not is_noun:
            yield file.at(item.node, f"a policy may not import {item.name}")


def rule_policies_only_decide(file: Source) -> Iterator[str]:
    """A policy neither waits nor touches the world."""
    if not file.is_policy or file.room not in PRODUCT:
        return
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    for node in file.nodes:
        if isinstance(node, waiting):
            yield file.at(node, "a policy may not await")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in POLICY_NEVER_CALLS:
                yield file.at(node, f"a policy may not call {node.func.id}()")
        elif isinstance(node, ast.Global):
            yield file.at(node, "a policy may not keep module state")


def rule_environment_in_one_file(file: Source) -> Iterator[str]:
    """The environment is read by gateway/settings/config.py and by nothing else of the product."""
    if file.room not in PRODUCT or file.path == "gateway/settings/config.py":
        return
    names = {"environ", "environb", "getenv", "putenv"}
    for node in file.nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == "os" and node.attr in names:
            yield file.at(node, "only gateway/settings/config.py reads the environment")
    for item in imports(file):
        if item.top == "os" and item.name.split(".")[-1] in names:
            yield file.at(item.node, "only gateway/settings/config.py reads the environment")


def rule_cuda_in_one_place(file: Source) -> Iterator[str]:
    """Only backend/cuda*.py, their door and the kernels know that device by name, prose apart."""
    if file.room not in PRODUCT or file.path.startswith(CUDA_HOMES):
        return
    prose = {id(node) for node in docstrings(file.tree)}
    for node in file.nodes:
        for word in words(node, prose):
            if "cuda" in word.lower():
                yield file.at(node, f"{word!r}: only backend/cuda*.py and kernels/ say cuda")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """The constants that are docstrings or other bare strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def words(node: ast.AST, prose: set[int]) -> Iterator[str]:
    """Identifiers and string constants that stand in this very node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
        yield node.value
    for field in ("id", "attr", "name", "arg", "module", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def rule_file_size(file: Source) -> Iterator[str]:
    """A file is one idea; a file that outgrows its cap is split by idea."""
    cap = MAX_TEST_LINES if file.room == "tests" else MAX_PRODUCT_LINES
    num_lines = file.text.count("\n")
    if num_lines > cap and "/versions/" not in file.path:
        yield f"{file.path}: {num_lines} lines, the cap is {cap}"


def rule_no_splinters(file: Source) -> Iterator[str]:
    """A file of a few lines is a part of an idea: it belongs to its neighbour."""
    is_face = file.path.endswith("/__init__.py")
    if file.room not in PRODUCT or is_face or "/versions/" in file.path:
        return
    num_lines = file.text.count("\n")
    if num_lines < MIN_PRODUCT_LINES and file.path not in SHORT_FILES:
        yield f"{file.path}: {num_lines} lines, the least is {MIN_PRODUCT_LINES}"


def rule_function_size(file: Source) -> Iterator[str]:
    """A function fits a screen."""
    if file.room == "tests" or "/versions/" in file.path:
        return
    for function in functions(file):
        num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        names = {node.id for node in function.decorator_list if isinstance(node, ast.Name)}
        is_kernel = file.room == "kernels" and "jit" in names
        cap = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
        if num_lines > cap:
            yield file.at(function, f"{function.name}: {num_lines} lines > {cap}")


def rule_module_docstring(file: Source) -> Iterator[str]:
    """Every module says what it is; an empty `__init__.py` needs no words."""
    if file.text.strip() and not ast.get_docstring(file.tree):
        yield f"{file.path}: no module docstring"


def rule_engine_init_is_empty(file: Source) -> Iterator[str]:
    """`engine.protocol` is imported where torch must not be, so packages on its way do nothing."""
    if file.path in {"engine/__init__.py", "kernels/__init__.py"} and file.text.strip():
        yield f"{file.path}: has to stay empty"


def rule_no_imports_in_functions(file: Source) -> Iterator[str]:
    """A circle is broken by moving code, not by hiding the import."""
    for function in functions(file):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield file.at(node, f"import inside {function.name}()")


def rule_nothing_left_open(file: Source) -> Iterator[str]:
    """What is not finished is an issue, not a note in the code."""
    if file.path == "tests/test_layout.py":
        return  # has to spell the words
    for number, line in enumerate(file.text.splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{file.path}:{number}: {line.strip()}"


RULES: tuple[Rule, ...] = (
    rule_rooms,
    rule_one_home,
    rule_only_for,
    rule_leaves_import_the_standard_library,
    rule_policies_import_nothing_that_acts,
    rule_policies_only_decide,
    rule_environment_in_one_file,
    rule_cuda_in_one_place,
    rule_file_size,
    rule_no_splinters,
    rule_function_size,
    rule_module_docstring,
    rule_engine_init_is_empty,
    rule_no_imports_in_functions,
    rule_nothing_left_open,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    violations = [violation for file in sources() for violation in rule(file)]
    assert not violations, "\n" + "\n".join(violations)


def test_top_level_is_the_fixed_one() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(PACKAGES)


# Each rule with a text that breaks it: a rule that cannot fail guards nothing.
BROKEN: tuple[tuple[Rule, str, str], ...] = (
    (rule_rooms, "gateway/limits/limits.py", "import torch"),
    (rule_rooms, "gateway/limits/limits.py", "from engine import engine"),
    (rule_rooms, "gateway/limits/limits.py", "from engine.memory.page_pool import PagePool"),
    (rule_rooms, "engine/worker/main.py", "import sqlalchemy"),
    (rule_rooms, "engine/worker/main.py", "from starlette.requests import Request"),
    (rule_rooms, "kernels/rope.py", "from engine import batch"),
    (rule_rooms, "registry/keys.py", "from gateway.types import Limits"),
    (rule_one_home, "gateway/auth/auth.py", "from starlette.requests import Request"),
    (rule_one_home, "gateway/limits/store.py", "import redis.asyncio"),
    (rule_leaves_import_the_standard_library, "engine/objects/x.py", "import msgspec"),
    (rule_leaves_import_the_standard_library, "engine/objects/x.py", "from engine import pack"),
    (
        rule_policies_import_nothing_that_acts,
        "gateway/dispatch/policy/fair_share.py",
        "import time",
    ),
    (rule_only_for, "gateway/http/app.py", "from admin.app import AdminApp"),
    (rule_only_for, "admin/pages/home.py", "from gateway.server import front"),
    (rule_policies_import_nothing_that_acts, "engine/policy/x.py", "from engine import batch"),
    (rule_policies_only_decide, "engine/policy/x.py", "async def f() -> None: ..."),
    (rule_policies_only_decide, "engine/policy/x.py", "print(1)"),
    (rule_environment_in_one_file, "admin/cli/main.py", "import os\nos.environ['A']"),
    (rule_environment_in_one_file, "admin/cli/main.py", "from os import getenv"),
    (rule_cuda_in_one_place, "engine/engine.py", "import torch\ntorch.cuda.synchronize()"),
    (rule_cuda_in_one_place, "engine/engine.py", "device = 'cuda:0'"),
    (rule_file_size, "engine/engine.py", "\n" * (MAX_PRODUCT_LINES + 1)),
    (rule_no_splinters, "gateway/limits/x.py", "A = 1\n"),
    (rule_function_size, "engine/x.py", "def f() -> None:\n" + "    f()\n" * MAX_FUNCTION_LINES),
    (rule_function_size, "engine/x.py", "@jit\ndef f():\n" + "    f()\n" * MAX_FUNCTION_LINES),
    (rule_function_size, "kernels/x.py", "@jit\ndef f():\n" + "    f()\n" * MAX_KERNEL_LINES),
    (rule_module_docstring, "engine/x.py", "A = 1"),
    (rule_engine_init_is_empty, "engine/__init__.py", "import torch"),
    (rule_no_imports_in_functions, "engine/x.py", "def f() -> None:\n    import json"),
    (rule_nothing_left_open, "engine/x.py", "# TODO: later"),
)

KEPT: tuple[tuple[Rule, str, str], ...] = (
    (rule_rooms, "gateway/types.py", "from engine.protocol import Finish"),
    (rule_rooms, "gateway/types.py", "from engine import protocol"),
    (rule_rooms, "gateway/x.py", "from engine.objects.object_store import ObjectStore"),
    (
        rule_leaves_import_the_standard_library,
        "engine/objects/x.py",
        "import os\nfrom engine.objects.object_store import ObjectStore",
    ),
    (rule_rooms, "bench/serve.py", "import aiohttp"),
    (rule_only_for, "gateway/server/gateway_process.py", "from admin.app import AdminApp"),
    (rule_one_home, "gateway/http/chat.py", "from starlette.routing import Route"),
    (
        rule_policies_import_nothing_that_acts,
        "gateway/limits/policy/x.py",
        "from gateway.limits.policy.y import z",
    ),
    (rule_policies_import_nothing_that_acts, "gateway/limits/policy/x.py", "import gateway.types"),
    (rule_environment_in_one_file, "gateway/settings/config.py", "import os\nos.environ['A']"),
    (rule_cuda_in_one_place, "engine/engine.py", '"""Runs on CPU and CUDA alike."""\n# cuda'),
    (rule_function_size, "kernels/x.py", "@jit\ndef f():\n" + "    f()\n" * MAX_FUNCTION_LINES),
    (rule_module_docstring, "engine/__init__.py", ""),
)


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_rule_bites(rule: Rule, path: str, text: str) -> None:
    assert list(rule(source(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), KEPT)
def test_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(source(path, text)))
