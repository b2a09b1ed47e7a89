"""The documentation compared with the code: files, links, settings, routes, metrics, CLI.

These tests fail when a setting, a route, a metric, a message, a command or a file is added without
its line in the documentation.
"""

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from starlette.routing import Route

from admin.cli.main import GROUPS, build_parser
from engine import protocol
from engine.config import EngineConfig, WorkerConfig
from engine.protocol import ModelStatus, WorkerStatus
from gateway import errors
from gateway.http.app import create_app
from gateway.metrics.families import MetricsRegistry
from gateway.metrics.metrics import Metrics
from gateway.metrics.state_metrics import StateCollector
from gateway.protocols import Accounts, DispatcherSnapshot, LedgerSnapshot
from gateway.settings.settings import Settings, settings_reference
from tests import files_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def read(name: str) -> str:
    """A page's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def anchor_of(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings."""
    return {anchor_of(title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_list_of_files_is_up_to_date() -> None:
    if files_page.PAGE.read_text(encoding="utf-8") != files_page.render():
        pytest.fail("docs/files.md is older than the sources: run `make files`", pytrace=False)


def test_every_page_is_in_the_reading_order() -> None:
    order = re.findall(r"\]\(([\w-]+\.md)\)", read("docs/README.md"))
    assert sorted(order) == [page.name for page in PAGES if page.name != "README.md"]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            broken.append(target)
    assert not broken


def test_every_entry_of_the_log_is_in_its_index_once() -> None:
    head, entries = read("docs/log.md").split("\n## Index by subject\n", 1)[1].split("\n## ", 1)
    listed = re.findall(r"^- \[.+\]\(#(.+?)\)", head, re.MULTILINE)
    titles = re.findall(r"^## (.+)$", f"## {entries}", re.MULTILINE)
    assert sorted(listed) == sorted(anchor_of(title) for title in titles)


def test_every_setting_is_documented_as_the_code_says() -> None:
    page = read("docs/configuration.md")
    rows = [
        f"| `{row.name}` | `{msgspec.json.encode(row.default).decode()}` | {row.description} |"
        for row in settings_reference()
    ]
    missing = [row for row in rows if row not in page]
    assert not missing, "rows for docs/configuration.md:\n" + "\n".join(missing)


@pytest.mark.parametrize("config", [EngineConfig, WorkerConfig])
def test_every_bound_of_the_worker_is_documented(config: type[msgspec.Struct]) -> None:
    page = read("docs/configuration.md")
    defaults = {field.name: field.default for field in msgspec.structs.fields(config)}
    rows = [
        f"| `{name}` | " + ("" if default is msgspec.NODEFAULT else f"`{default}`")
        for name, default in defaults.items()
    ]
    missing = [row for row in rows if row not in page]
    assert not missing, "rows for docs/configuration.md:\n" + "\n".join(missing)


def test_every_message_of_the_worker_protocol_is_documented() -> None:
    page = read("docs/worker-protocol.md")
    messages = [*typing.get_args(protocol.ToWorker), *typing.get_args(protocol.FromWorker)]
    assert not [message.__name__ for message in messages if f"`{message.__name__}`" not in page]
    assert f"version {protocol.PROTOCOL_VERSION}" in page


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a parser."""
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a parser but for those that every command has."""
    common = {"--help", "--data-dir", "--config", "--json"}
    found = {option for action in parser._actions for option in action.option_strings}
    return {option for option in found if option.startswith("--")} - common


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_and_option_is_documented(group: str) -> None:
    section = read("docs/cli.md").split(f"\n## {group}\n", 1)[1].split("\n## ", 1)[0]
    parser = commands_of(build_parser([group]))[group]
    wanted = {f"polyhost {group}"} | options_of(parser)
    for name, command in commands_of(parser).items():
        wanted |= {f"polyhost {group} {name}"} | options_of(command)
    assert not sorted(text for text in wanted if text not in section)


def metric_families() -> Iterator[Metric]:
    """Every family that /metrics shows, from the objects that make them."""
    registry = CollectorRegistry()
    Metrics(registry)
    yield from registry.collect()
    state: dict[str, typing.Any] = {
        field.name: {"a": 1} if "Mapping" in str(field.type) else 1
        for field in dataclasses.fields(DispatcherSnapshot)
    }
    state["accounts"] = Accounts({"a": 1.0}, {"a": 1.0})
    written: dict[str, typing.Any] = {f.name: 1 for f in dataclasses.fields(LedgerSnapshot)}
    model = ModelStatus("a", "resident", 1, 1, 1, 1, 1.0)
    worker = WorkerStatus(
        "e", "w", 1, 1, 1.0, 1, 1, {"a/kv": 1}, [model], [], [], {"preemptions": 1.0}
    )
    dispatcher, ledger = mock.Mock(ready=True), mock.Mock()
    dispatcher.worker_statuses.return_value = [worker]
    dispatcher.snapshot.return_value = DispatcherSnapshot(**state)
    ledger.snapshot.return_value = LedgerSnapshot(**written)
    yield from StateCollector(dispatcher, ledger, lambda: 1).collect()


def test_every_metric_is_documented() -> None:
    page = read("docs/metrics.md")
    names = [
        family.name + ("_total" if family.type == "counter" else "") for family in metric_families()
    ]
    assert not [name for name in names if f"`{name}`" not in page]


def test_every_route_is_documented() -> None:
    settings = Settings(ollama_key_id="key_1")
    services = mock.Mock(metrics_registry=MetricsRegistry(), settings=settings)
    page = read("docs/api.md")
    missing = []
    for route in create_app(services, {}).routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        methods = (route.methods or set()) - {"HEAD"}
        missing += [f"{method} {path}" for method in methods if f"`{method} {path}`" not in page]
    assert not missing


def test_every_error_is_documented() -> None:
    page = read("docs/api.md")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, errors.ErrorKind)]
    rows = [f"| {kind.status} | `{kind.code}` |" for kind in kinds]
    assert not [row for row in rows if row not in page]
