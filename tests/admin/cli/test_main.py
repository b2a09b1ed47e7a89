"""`polyhost` from its arguments to its exit status, over a real data folder."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from admin.cli.common import (
    instant,
    parse_duration,
    parse_instant,
    parse_size,
    per_million,
    size,
    units,
)
from admin.cli.main import GROUPS, main
from admin.registration import registrar
from registry import audit, locks, schema
from registry.accounts import api_keys
from registry.session import make_engine, reading
from tests.admin.cli.conftest import AddModels, Run
from tests.migrated import migrated

FAKE = (sys.executable, str(Path(__file__).parents[1] / "registration" / "fake_register.py"))


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "REGISTER_COMMAND", FAKE)


def as_json(text: str) -> Any:
    return json.loads(text)


def model_folder(tmp_path: Path, name: str, **files: str) -> str:
    path = tmp_path / name
    path.mkdir()
    for file, text in {"config.json": name, **files}.items():
        (path / file).write_text(text)
    return str(path)


def test_a_tenant_gets_a_key_with_limits(run: Run, data_dir: Path) -> None:
    tenant = run("tenants", "add", "acme", "--weight", "2").strip()
    plaintext = run("keys", "create", "--tenant", "acme", "--name", "ci", "--rpm", "60").strip()
    assert plaintext.startswith("sk-ph-")
    (key,) = as_json(run("keys", "list", "--json"))
    assert (key["tenant"], key["tenant_id"], key["name"]) == ("acme", tenant, "ci")
    assert key["public_id"] == api_keys.public_id_of(plaintext)
    assert not any("digest" in name or "salt" in name or name == "key" for name in key)
    run("limits", "set", key["id"], "--tpm", "1000", "--concurrency", "4")
    shown = as_json(run("limits", "show", key["public_id"], "--json"))
    assert shown["requests_per_minute"] == 60
    assert shown["tokens_per_minute"] == 1000
    assert shown["max_concurrency"] == 4
    assert "requests_per_day          unlimited" in run("limits", "show", key["id"])
    assert plaintext not in run("keys", "list")
    assert "acme" in run("tenants", "list")


def test_a_key_is_rotated_and_revoked(run: Run, add_models: AddModels) -> None:
    run("tenants", "add", "acme")
    add_models("a", "b")
    made = as_json(
        run(
            *("keys", "create", "--tenant", "acme", "--name", "ci", "--json"),
            *("--expires-in", "30d", "--models", "a, b", "--cache", "exact"),
        )
    )
    assert made["allowed_models"] == ["a", "b"]
    assert made["cache_mode"] == "exact"
    assert made["expires_at"] - made["created_at"] == 30 * 86400
    rotated = as_json(run("keys", "rotate", made["id"], "--grace", "1h", "--json"))
    assert rotated["key"] != made["key"]
    assert rotated["public_id"] == made["public_id"]
    assert "revoked" in run("keys", "revoke", made["id"])
    assert "revoked" in run("keys", "list", "--tenant", "acme")
    assert "revoked" in run("keys", "rotate", made["id"], status=2)


def test_limits_of_tenants_models_and_the_gateway(run: Run) -> None:
    run("tenants", "add", "acme")
    tenant = as_json(
        run("limits", "set", "--tenant", "acme", "--tpd", "9", "--max-output", "4", "--json")
    )
    assert (tenant["scope"], tenant["name"], tenant["tokens_per_day"]) == ("tenant", "acme", 9)
    run("limits", "set", "--gateway", "--concurrency", "100")
    assert as_json(run("limits", "show", "--gateway", "--json"))["max_concurrency"] == 100
    listed = as_json(run("limits", "list", "--json"))
    assert [(one["scope"], one["name"]) for one in listed] == [
        ("gateway", "gateway"),
        ("tenant", "acme"),
    ]
    assert "tpd 9, max-output 4" in run("limits", "list")
    run("limits", "set", "--tenant", "acme", "--tpd", "0", "--max-output", "0")
    assert [one["scope"] for one in as_json(run("limits", "list", "--json"))] == ["gateway"]
    assert "none" in run("limits", "set", "--model", "none", "--rpm", "1", status=1)
    assert "between 0 (unlimited)" in run("limits", "set", "--gateway", "--rpm", "-1", status=2)
    assert "such as --rpm" in run("limits", "set", "--gateway", status=2)
    paid = as_json(run("limits", "set", "--tenant", "acme", "--budget-month", "12.5", "--json"))
    assert paid["month_budget_nanos"] == 12_500_000_000
    assert "12.500000000" in run("limits", "show", "--tenant", "acme")
    assert "budget-month 12.500000000" in run("limits", "list")


def test_a_keys_bounds(run: Run, add_models: AddModels) -> None:
    run("tenants", "add", "acme")
    add_models("a", "b")
    create = ("keys", "create", "--tenant", "acme", "--name", "ci", "--json")
    made = as_json(run(*create, "--cidrs", "10.0.0.0/8, 192.0.2.7"))
    assert made["allowed_cidrs"] == ["10.0.0.0/8", "192.0.2.7/32"]
    assert "10.0.0.0/8,192.0.2.7/32" in run("keys", "list")
    said = run("keys", "set", made["id"], "--models", "a,b", "--cidrs", "any")
    assert "models a,b; networks any; expires never" in said
    changed = as_json(run("keys", "set", made["id"], "--expires-in", "1h", "--json"))
    assert changed["allowed_models"] == ["a", "b"]
    assert changed["expires_at"] > made["created_at"]
    assert "expires never" in run("keys", "set", made["id"], "--expires-in", "never")
    assert "no such model: 'c'" in run("keys", "set", made["id"], "--models", "a,c", status=2)
    assert "nothing to change" in run("keys", "set", made["id"], status=2)
    assert "10.0.0.1/8" in run("keys", "set", made["id"], "--cidrs", "10.0.0.1/8", status=2)
    assert "at least one" in run("keys", "set", made["id"], "--models", ",", status=2)


def test_a_disabled_tenant(run: Run) -> None:
    run("tenants", "add", "acme")
    run("keys", "create", "--tenant", "acme", "--name", "ci")
    run("tenants", "set", "acme", "--disable", "--weight", "3")
    (tenant,) = as_json(run("tenants", "list", "--json"))
    assert (tenant["disabled"], tenant["weight"]) == (True, 3.0)
    assert "tenant disabled" in run("keys", "list")
    assert "active" in run("tenants", "set", "acme", "--enable")
    assert "internal" in run("tenants", "set", "acme", "--internal")
    assert "internal" in run("tenants", "set", "acme", "--weight", "1"), "what is not said stays"
    assert "internal" not in run("tenants", "set", "acme", "--no-internal")
    assert "kept 7 days" in run("tenants", "set", "acme", "--response-retention-days", "7")
    assert "kept 7 days" in run("tenants", "set", "acme", "--weight", "1")
    assert "kept" not in run("tenants", "set", "acme", "--response-retention-days", "default")
    run("tenants", "add", "own", "--internal")
    assert "active, internal" in run("tenants", "list")


def test_the_audit_log_names_the_os_user(run: Run, data_dir: Path) -> None:
    run("tenants", "add", "acme")
    engine = make_engine(f"sqlite:///{data_dir / 'polyhost.db'}")
    with reading(engine) as session:
        (entry,) = audit.latest(session)
    engine.dispose()
    assert entry.actor.startswith("cli:")
    assert len(entry.actor) > len("cli:")


def test_a_model_from_folder_to_removal(run: Run, data_dir: Path, tmp_path: Path) -> None:
    source = model_folder(tmp_path, "good")
    assert "tiny is ready" in run("models", "add", "tiny", "--source", source, "--pin")
    (model,) = as_json(run("models", "list", "--json"))
    assert (model["name"], model["state"], model["pinned"]) == ("tiny", "ready", True)
    assert "not pinned" in run("models", "unpin", "tiny")
    assert "is pinned" in run("models", "pin", "tiny")
    assert "256" in run("models", "list")
    assert "rev-good-auto" in run("models", "show", "tiny")
    run("prices", "set", "tiny", "--prompt", "0.15", "--completion", "0.6")
    (price,) = as_json(run("prices", "show", "tiny", "--json"))
    assert (price["prompt_nanos"], price["cached_nanos"], price["completion_nanos"]) == (
        150,
        150,
        600,
    )
    assert "no server is running" in run("models", "load", "tiny", status=1)
    with locks.hold(data_dir / locks.SERVER_LOCK):
        assert "asked the server" in run("models", "load", "tiny")
        assert "asked the server" in run("models", "unload", "tiny")
    assert "removed" in run("models", "rm", "tiny")
    assert as_json(run("models", "list", "--json")) == []
    assert as_json(run("models", "list", "--all", "--json"))[0]["state"] == "removed"
    assert "0.15" in run("prices", "show")
    assert "unknown model" in run("models", "rm", "tiny", status=1)


def test_a_model_that_cannot_be_hosted(
    run: Run, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = model_folder(tmp_path, "bad", refuse="the weights are a pickle: convert them")
    assert main(["models", "add", "m", "--source", source, "--data-dir", str(data_dir)]) == 1
    assert "m is failed: the weights are a pickle: convert them" in capsys.readouterr().err
    assert "pickle_weights" in run("models", "list")
    assert "model ID" in run("models", "add", "m", "--source", "/no/such/folder", status=2)


def test_mistakes_are_one_line_with_a_remedy(run: Run, data_dir: Path) -> None:
    assert "polyhost serve" in run("keys", "list", status=1)
    assert not data_dir.exists()
    run("db", "upgrade")
    assert "polyhost tenants list" in run(
        "keys", "create", "--tenant", "none", "--name", "x", status=1
    )
    assert "polyhost keys list" in run("keys", "revoke", "key_none", status=1)
    assert "--rpm" in run("limits", "set", "key_none", status=2)
    assert "weight" in run("tenants", "add", "x", "--weight", "-1", status=2)
    run("tenants", "add", "x")
    assert "already exists" in run("tenants", "add", "x", status=1)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["models"],
        ["models", "add", "x"],
        ["tenants", "add", "x", "--weight", "heavy"],
        ["keys", "create", "--tenant", "t", "--name", "n", "--cache", "near"],
        ["keys", "set", "key_x", "--false-hit-budget", "much"],
        ["keys", "set", "key_x", "--cache-max-age", "old"],
        ["prices", "set", "m", "--prompt", "0.0001", "--completion", "1"],
        ["prices", "set", "m", "--prompt", "nan", "--completion", "1"],
        ["usage", "export", "--from", "yesterday"],
        ["usage", "export", "--from", "9999-12-31T23:59:59-23:00"],
        ["usage", "export", "--from", "0001-01-01T00:00:00+23:00"],
        ["prices", "set", "m", "--prompt", "1e999999999", "--completion", "1"],
        ["limits", "set", "--gateway", "--budget-day", "1e999999999"],
        ["limits", "set", "--gateway", "--budget-day", "1e11"],
        ["keys", "create", "--tenant", "t", "--name", "n", "--expires-in", "999999w"],
        ["keys", "create", "--tenant", "t", "--name", "n", "--expires-in", "9" * 400],
    ],
)
def test_command_lines_that_make_no_sense_are_status_2(
    data_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "usage: polyhost" in capsys.readouterr().err
    assert not data_dir.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["keys", "list", "--tenant", "\udcff"],
        ["tenants", "add", "\udcff"],
        ["usage", "export", "--model", "\udcff"],
        ["plans", "assign", "x", "\udcff"],
        ["invoices", "show", "\udcff"],
    ],
)
def test_bytes_that_are_no_text_are_one_line(run: Run, arguments: list[str]) -> None:
    run("tenants", "add", "x")
    assert "udcff" in run(*arguments, status=2)


def test_an_instant_that_is_no_date_does_not_spoil_a_list() -> None:
    assert instant(253_402_300_799.0) == "9999-12-31 23:59:59"
    assert instant(253_402_300_800.0) == instant(math.inf) == "after 9999"


def test_a_database_of_another_build(run: Run, data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "polyhost.db").write_bytes(b"")
    assert "db upgrade" in run("tenants", "list", status=1)
    assert f"at version {schema.HEAD}" in run("db", "upgrade")
    (data_dir / "polyhost.db").write_bytes(b"this is no database at all" * 100)
    assert "database" in run("tenants", "list", status=1)


def test_the_data_folder_comes_from_the_environment_or_a_file(
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("one", "two"):
        migrated(f"sqlite:///{tmp_path / name / 'polyhost.db'}")
    monkeypatch.setenv("POLYHOST_DATA_DIR", str(tmp_path / "one"))
    assert main(["tenants", "add", "in-one"]) == 0
    (tmp_path / "my.toml").write_text('data_dir = "two"')
    monkeypatch.delenv("POLYHOST_DATA_DIR")
    assert main(["tenants", "add", "in-two", "--config", "my.toml"]) == 0
    capsys.readouterr()
    assert main(["tenants", "list", "--data-dir", str(tmp_path / "one")]) == 0
    assert "in-one" in capsys.readouterr().out
    assert main(["--data-dir", "two", "tenants", "list"]) == 0
    assert "in-two" in capsys.readouterr().out
    (tmp_path / "my.toml").write_text("colour = 1")
    assert main(["tenants", "list", "--config", "my.toml"]) == 2
    assert "colour" in capsys.readouterr().err


@pytest.mark.parametrize("group", [name for name in GROUPS if name != "serve"])
def test_every_group_explains_itself(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    assert f"usage: polyhost {group}" in capsys.readouterr().out


def test_help_names_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(group in out for group in GROUPS)


def test_registry_commands_do_without_the_server(data_dir: Path) -> None:
    """Neither torch nor the HTTP stack: `polyhost keys list` has to be quick."""
    program = (
        "import sys\n"
        "from admin.cli.main import main\n"
        f"main(['tenants', 'add', 'x', '--data-dir', {str(data_dir)!r}])\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'tokenizers', 'numpy', 'zmq'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_a_closed_pipe_is_no_traceback(run: Run, data_dir: Path) -> None:
    run("tenants", "add", "x")
    command = f"{sys.executable} -m gateway tenants list --data-dir {data_dir} | true"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert done.stderr == ""


def test_units() -> None:
    assert [parse_duration(text) for text in ("90", "90s", "1.5m", "12h", "30d", "2w")] == [
        90,
        90,
        90,
        43200,
        2592000,
        1209600,
    ]
    assert [parse_size(text) for text in ("512", "1K", "512MiB", "1.5g")] == [
        512,
        1024,
        512 << 20,
        3 << 29,
    ]
    assert size(1536) == "1.5 KiB"
    assert size(5 << 40) == "5.0 TiB"
    assert units(1_500_000_001) == "1.500000001"
    assert units(-1) == "-0.000000001"
    assert per_million(150) == "0.15"
    assert parse_instant("2026-01-01") == parse_instant("2026-01-01T01:00:00+01:00")
