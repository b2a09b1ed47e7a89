"""Settings: sources and their order, clear errors, and a reference that is complete."""

import json
from pathlib import Path

import msgspec
import pytest

from gateway import config
from gateway.config import SettingsError, load_settings
from gateway.settings import Settings, settings_reference


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "polyhost.toml"
    file.write_text('host = "0.0.0.0"\nport = 1\nqueue_timeout_s = 7\ndemo = true\n')
    settings = load_settings(
        file,
        {"port": 3, "host": None},
        {"POLYHOST_PORT": "2", "POLYHOST_HOST": "::1", "POLYHOST_DEMO": "false"},
    )
    assert (settings.host, settings.port, settings.queue_timeout_s) == ("::1", 3, 7.0)
    assert settings.demo is False
    assert settings.max_num_seqs == Settings().max_num_seqs


def test_the_working_directory_s_file_is_read_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings(environ={}).port == 8000
    (tmp_path / "polyhost.toml").write_text("port = 9\n")
    assert load_settings(environ={}).port == 9


@pytest.mark.parametrize(
    ("overrides", "environ", "words"),
    [
        ({"port": -1}, {}, ["port", "-1", "the command line"]),
        ({}, {"POLYHOST_PORT": "many"}, ["port", "many", "POLYHOST_PORT"]),
        ({}, {"POLYHOST_DEMO": "perhaps"}, ["demo", "perhaps"]),
        ({}, {"POLYHOST_QUEUE_TIMEOUT_S": "0"}, ["queue_timeout_s", "> 0"]),
        ({"prot": 1}, {}, ["prot", "the command line"]),
        ({"page_bytes": 5000}, {}, ["page_bytes", "power of two"]),
        ({"max_queue_per_tenant": 5000}, {}, ["max_queue_per_tenant", "max_queue_total"]),
        ({"invoice_issuer": ""}, {}, ["invoice_issuer"]),
        ({"invoice_issuer": "two\nlines"}, {}, ["invoice_issuer"]),
        ({"invoice_issuer": "a line\n"}, {}, ["invoice_issuer"]),
        ({"status_interval_s": 5.0}, {}, ["worker_heartbeat_timeout_s"]),
    ],
)
def test_bad_values_are_one_clear_line(
    overrides: dict[str, object], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(overrides=overrides, environ=environ)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("port = \n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(broken)
    typo = tmp_path / "typo.toml"
    typo.write_text("prot = 1\n")
    with pytest.raises(SettingsError, match=r"unknown setting 'prot' in .*typo.toml"):
        load_settings(typo)


def test_unknown_environment_variables_are_others_business() -> None:
    assert load_settings(environ={"POLYHOST_NOT_A_SETTING": "x", "PORT": "1"}) == load_settings(
        environ={}
    )


def test_every_setting_may_come_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    rows = settings_reference()
    assert {row.name for row in rows} == {field.name for field in msgspec.structs.fields(Settings)}
    plain = {row.name: row.default for row in rows}
    environ = {
        row.env: str(row.default).lower() if row.type == "bool" else str(row.default)
        for row in rows
    }
    assert load_settings(environ=environ) == Settings()
    file = tmp_path / "polyhost.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    file.write_text("\n".join(lines))
    assert load_settings(file, environ={}) == Settings()


def test_the_reference_describes_every_field_with_its_default() -> None:
    rows = settings_reference()
    assert [row.name for row in rows] == list(Settings.__struct_fields__)
    for row in rows:
        assert row.default == getattr(Settings(), row.name)
        assert row.env == f"POLYHOST_{row.name.upper()}"
        assert row.description.endswith(".")


def test_derived_values(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "a" / ".." / "b"))
    assert settings.data_path == tmp_path / "b"
    assert settings.registry_url == f"sqlite:///{tmp_path / 'b' / 'polyhost.db'}"
    assert settings.lease_ttl_s == pytest.approx(2.0)


def test_workers_yield_when_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    environment = config.worker_environment(num_threads=3)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["KMP_BLOCKTIME"] == "7"
    assert environment["HOME"] == "/home/somebody"
    assert "OMP_NUM_THREADS" not in config.worker_environment(num_threads=0)


def test_workers_are_not_told_the_gateways_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(config.SECRETS) <= set(Settings.__struct_fields__)
    for name in config.SECRETS:
        monkeypatch.setenv(f"POLYHOST_{name.upper()}", "hunter2")
    assert "hunter2" not in config.worker_environment(num_threads=0).values()
