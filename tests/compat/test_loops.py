"""Loops of other people's clients (loops/), each in the environment of its requirements."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import Server
from tests.compat import environments
from tests.compat.served import prepare, serving

pytestmark = pytest.mark.compat

HERE = Path(__file__).resolve().parent
LOOPS = HERE / "loops"
PACKAGE = HERE / "js" / "package.json"
TIMEOUT_S = 600.0
REQUIREMENTS = {
    "requirements-agents.txt": (
        "anthropic",
        "langchain",
        "openai",
        "openai_agents",
        "others",
        "pydantic_ai",
    ),
    "requirements-litellm.txt": ("instructor", "litellm"),
}
"""By the packages that a loop needs."""
OPTIONS = (
    # Nothing of this repository's pytest but the loops themselves.
    *("-c", os.devnull, "--rootdir", str(LOOPS), "--confcutdir", str(LOOPS)),
    *("-p", "no:cacheprovider", "-o", "asyncio_mode=auto"),
    # LangChain keeps connections between tests.
    *("-o", "asyncio_default_test_loop_scope=session"),
    *("-o", "asyncio_default_fixture_loop_scope=session"),
)
CASES = [(file, loop) for file, loops in REQUIREMENTS.items() for loop in loops]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(prepare(tmp_path_factory.mktemp("loops"), ["another"])) as running:
        yield running


def test_each_loop_is_run() -> None:
    written = {path.stem.removeprefix("loop_") for path in LOOPS.glob("loop_*.py")}
    assert written == {loop for _, loop in CASES}


@pytest.mark.parametrize(("requirements", "loop"), CASES)
def test_a_loop(requirements: str, loop: str, server: Server) -> None:
    try:
        python = environments.environment(HERE / requirements)
    except environments.Missing as missing:
        pytest.skip(f"the packages of {requirements} cannot be had here: {missing}")
    command = [str(python), "-m", "pytest", *OPTIONS, "-q", str(LOOPS / f"loop_{loop}.py")]
    _run(command, server, PYTHONPATH=str(HERE.parents[1]))


def test_the_loops_of_javascript(server: Server) -> None:
    try:
        folder = environments.node_modules(PACKAGE)
    except environments.Missing as missing:
        pytest.skip(f"the packages of {PACKAGE.name} cannot be had here: {missing}")
    loop = shutil.copy(PACKAGE.with_name("loop.mjs"), folder)  # packages are looked for beside it
    _run(["node", "--test", str(loop)], server)


def _run(command: list[str], server: Server, **environment: str) -> None:
    place = {"COMPAT_URL": server.url, "COMPAT_KEY": server.api_key}
    ended = subprocess.run(
        command,
        env={**os.environ, **place, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
