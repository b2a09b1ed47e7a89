"""Runs the SDKs' own suites against a real server, and compares with expected.json.

    python -m tests.compat.suites      writes expected.json anew

A version of an SDK is its line of sdists.txt. Which models there are is read from its suite.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.servers import Server
from tests.compat import environments, outcomes
from tests.compat.served import Prepared, prepare, serving

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements-sdk.txt"
RESOURCES = Path("tests") / "api_resources"
RUN_TIMEOUT_S = 900.0
MODEL = re.compile(r"\bmodel(?:_id)?=\"([^\"]+)\"")
WHATEVER = ("model", "string")
"""The recorder's and the suites' word for any model."""


class Suite(NamedTuple):
    """`prefix`: of the base URL. `generating`, `embedding`: files that name models of that task.
    `options`: pytest's, beside ours."""

    prefix: str
    generating: tuple[str, ...]
    embedding: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


SUITES = {
    "openai": Suite(
        "/v1",
        ("chat/test_completions.py", "test_completions.py", "test_responses.py", "test_models.py"),
        ("test_embeddings.py",),
    ),
    "anthropic": Suite(
        "",
        ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py"),
        options=("-p", "tests._alias_httpx"),
    ),
}


def prepared_for(sources: Mapping[str, Path], root: Path) -> Prepared:
    """A data folder with the models that the suites ask for."""
    generating, embedding = set(WHATEVER), set[str]()
    for name, suite in SUITES.items():
        folder = sources[name] / RESOURCES
        for names, files in ((generating, suite.generating), (embedding, suite.embedding)):
            for file in files:
                names.update(MODEL.findall((folder / file).read_text()))
    return prepare(root, sorted(generating - embedding), sorted(embedding))


def run(name: str, python: Path, source: Path, server: Server, root: Path) -> dict[str, str]:
    """The outcome of each method. Raises AssertionError where pytest itself could not run."""
    suite, record = SUITES[name], root / f"{name}.jsonl"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE}{os.pathsep}{source / 'src'}",
        "COMPAT_KEY": server.api_key,
        "COMPAT_RECORD": str(record),
        "TEST_API_BASE_URL": server.url + suite.prefix,
    }
    plugins = ("-p", "recorder", *suite.options, "-p", "no:cacheprovider")
    options = ("-o", "addopts=", "--quiet", "--tb=no", "--no-summary")
    ended = subprocess.run(
        [str(python), "-m", "pytest", *plugins, *options, str(RESOURCES)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode in (0, 1), (ended.stdout + ended.stderr)[-3000:]
    return outcomes.outcomes(map(json.loads, record.read_text().splitlines()))


def main() -> None:
    """Raises environments.Missing where the packages cannot be had."""
    python = environments.environment(REQUIREMENTS)
    sources = environments.sources(python)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with serving(prepared_for(sources, root)) as server:
            found = {name: run(name, python, sources[name], server, root) for name in SUITES}
    outcomes.EXPECTED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
