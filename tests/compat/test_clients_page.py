"""The snippets of docs/clients.md are run as they stand; it has the versions of the pins."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import Server
from tests.compat import environments
from tests.compat.served import CROSS, SCRIPTED, prepare, serving

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parents[1] / "docs" / "clients.md").read_text()
SNIPPETS = dict(re.findall(r"^## ([\w \-]+)\n+```python\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
OLDER = ("LiteLLM", "instructor")
"""Sections whose packages are in the other environment."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(prepare(tmp_path_factory.mktemp("page"))) as running:
        yield running


@pytest.mark.compat
@pytest.mark.parametrize("section", sorted(SNIPPETS))
def test_a_snippet(section: str, server: Server) -> None:
    name = f"requirements-{'litellm' if section in OLDER else 'agents'}.txt"
    try:
        python = environments.environment(HERE / name)
    except environments.Missing as missing:
        pytest.skip(f"the packages of {name} cannot be had here: {missing}")
    code = SNIPPETS[section].replace("http://localhost:8000", server.url)
    code = code.replace("CROSS_ENCODER", CROSS).replace("MODEL", SCRIPTED)
    ended = subprocess.run(
        [str(python), "-c", code],
        env={**os.environ, "POLYHOST_KEY": server.api_key},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.search(r"You said: Hello|Oslo|\(\d, 0\.\d+\)", ended.stdout), ended.stdout


def test_the_versions_are_those_of_the_pins() -> None:
    pins: dict[str, str] = {}
    for name in ("requirements-agents.txt", "requirements-litellm.txt"):
        found = re.findall(r"^([\w\-]+)==(\S+)$", (HERE / name).read_text(), re.MULTILINE)
        pins = {**dict(found), **pins}
    script = json.loads((HERE / "js" / "package.json").read_text())["dependencies"]
    told = {
        cells[1].strip(): cells[2].strip().split(", ")
        for cells in (line.split("|") for line in PAGE.splitlines() if line.startswith("| "))
    }
    assert told.pop("client") == ["version"]
    wanted = {
        "[openai](#openai) for Python": [pins["openai"]],
        "openai for JavaScript": [script["openai"]],
        "[anthropic](#anthropic)": [pins["anthropic"]],
        "[openai-agents](#openai-agents)": [pins["openai-agents"]],
        "[pydantic-ai](#pydantic-ai)": [pins["pydantic-ai-slim"]],
        "[LangChain](#langchain) (langchain-openai, langchain-anthropic)": [
            pins["langchain-openai"],
            pins["langchain-anthropic"],
        ],
        "[LiteLLM](#litellm) (SDK)": [pins["litellm"]],
        "[instructor](#instructor)": [pins["instructor"]],
        "[AI SDK](#ai-sdk)": [script["ai"]],
        "[cohere](#cohere)": [pins["cohere"]],
        "[Ollama's client](#ollama)": [pins["ollama"]],
    }
    assert told == wanted
    sdists = (HERE / "sdists.txt").read_text()
    for name in ("openai", "anthropic"):
        assert f"{name}=={pins[name]} " in sdists
