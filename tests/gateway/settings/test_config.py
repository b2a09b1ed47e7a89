"""Settings: sources and their order, clear errors, and a reference that is complete."""

import json
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from gateway.settings import config
from gateway.settings.config import SettingsError, load_settings
from gateway.settings.settings import Settings, settings_reference
from gateway.settings.worker_settings import WorkerSpec


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
        ({}, {"POLYHOST_ADMIN_IDLE_S": "inf"}, ["admin_idle_s", "POLYHOST_ADMIN_IDLE_S", "finite"]),
        ({"cache_least_logprob": float("-inf")}, {}, ["cache_least_logprob", "finite"]),
        ({"queue_timeout_s": float("nan")}, {}, ["queue_timeout_s"]),
        ({"allowed_hosts": "a.example, b.example:80"}, {}, ["allowed_hosts", "b.example:80"]),
        ({"metrics_token": "short"}, {}, ["metrics_token", "16"]),
        ({}, {"POLYHOST_METRICS_TOKEN": "sixteen or more, with spaces"}, ["metrics_token"]),
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
    assert {row.name for row in rows} == {field.name for field in fields(Settings)}
    plain = {row.name: row.default for row in rows}
    environ = {
        row.env: str(row.default) if row.type == "str" else json.dumps(row.default) for row in rows
    }
    assert load_settings(environ=environ) == Settings()
    file = tmp_path / "polyhost.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    file.write_text("\n".join(lines))
    assert load_settings(file, environ={}) == Settings()


def test_workers_are_tables_of_the_file_or_json(tmp_path: Path) -> None:
    file = tmp_path / "polyhost.toml"
    file.write_text('[[workers]]\ndevice = "cuda:1"\nlabels = ["big"]\n[[workers]]\nthreads = 2\n')
    listed = (WorkerSpec(device="cuda:1", labels=("big",)), WorkerSpec(threads=2))
    settings = load_settings(file, environ={})
    assert settings.workers == listed
    assert config.decode_settings(msgspec.json.encode(settings)) == settings
    text = '[{"device": "cuda:1", "labels": ["big"]}, {"threads": 2}]'
    assert load_settings(environ={"POLYHOST_WORKERS": text}).workers == listed
    for wrong in ('{"device": "cpu"}', "2", '[{"devices": "cpu"}]', '[{"device": "gpu"}]', "["):
        with pytest.raises(SettingsError, match="workers"):
            load_settings(environ={"POLYHOST_WORKERS": wrong})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], "must have different names"),
        (["worker-1", ""], "must have different names"),
        (["hub"], "none of dispatcher, embedder-0, hub, operator"),
        (["A b"], "name"),
        (["../x"], "name"),
        (["cache-gateway-0"], "name"),
    ],
)
def test_workers_have_names_of_their_own(names: list[str], said: str) -> None:
    tables = json.dumps([{"name": name} for name in names])
    with pytest.raises(SettingsError, match=said):
        load_settings(environ={"POLYHOST_WORKERS": tables})


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        (["tcp://a:7600", "tcp://a:7600"], "must have different endpoints"),
        (["tcp://a:0"], "port of tcp://a:0 must be between 1 and 65535"),
        (["tcp://a:65536"], "port of tcp://a:65536 must be"),
        (["a:7600"], "endpoint"),
    ],
)
def test_a_worker_on_another_machine_has_an_address_of_its_own(
    endpoints: list[str], said: str
) -> None:
    tables = [{"endpoint": endpoint, "public_key": "k" * 40} for endpoint in endpoints]
    with pytest.raises(SettingsError, match=said):
        load_settings(environ={"POLYHOST_WORKERS": json.dumps(tables)})


def test_the_reference_describes_every_field_with_its_default() -> None:
    rows = settings_reference()
    assert [row.name for row in rows] == [field.name for field in fields(Settings)]
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


def test_a_secret_of_the_wrong_type_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "polyhost.toml"
    for name in config.SECRETS:
        file.write_text(f"{name} = 3141592653\n")
        with pytest.raises(config.SettingsError, match=name) as found:
            load_settings(file, environ={})
        assert "3141592653" not in str(found.value)


def test_a_text_with_a_form_has_no_line_behind_it() -> None:
    """`$` matches before a last newline, and such a setting would go into names and bills."""
    formed = [f for f in fields(Settings) if "pattern" in f.metadata["bounds"]]
    assert {field.name for field in formed} >= {"device", "currency", "redis_prefix"}
    for field in formed:
        load_settings(overrides={field.name: field.default}, environ={})
        with pytest.raises(SettingsError, match=field.name):
            load_settings(overrides={field.name: f"{field.default}\n"}, environ={})


def test_what_a_process_hands_to_another_is_checked_again() -> None:
    settings = Settings(port=8123, currency="EUR")
    sent = msgspec.json.encode(settings)
    assert config.decode_settings(sent) == settings
    for wrong in (b'{"port":70000}', b'{"prot":1}', b'{"currency":"EUR\\n"}', b'{"port":'):
        with pytest.raises(SettingsError):
            config.decode_settings(wrong)


PASSED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("PYTHONPATH", "VIRTUAL_ENV", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HOME"),
    *("TORCH_LOGS", "PYTORCH_ALLOC_CONF", "TRITON_INTERPRET", "XDG_CACHE_HOME", "MALLOC_ARENA_MAX"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME"),
)
KEPT_BACK = (
    *(f"POLYHOST_{field.name.upper()}" for field in fields(Settings)),
    *("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "HF_TOKEN", "HF_ENDPOINT"),
    *("HUGGING_FACE_HUB_TOKEN", "HTTPS_PROXY", "https_proxy", "SENTRY_DSN", "TORCH_API_KEY"),
)


def test_workers_are_told_what_they_need_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PASSED:
        monkeypatch.setenv(name, "needed")
    for name in KEPT_BACK:
        monkeypatch.setenv(name, "hunter2")
    environment = config.worker_environment(num_threads=0)
    assert {name: environment.get(name) for name in PASSED} == dict.fromkeys(PASSED, "needed")
    assert "hunter2" not in environment.values()
    for_hub = config.hub_environment()
    assert {for_hub.get("HF_TOKEN"), for_hub.get("HTTPS_PROXY")} == {"hunter2"}
    assert not {"PGPASSWORD", "POLYHOST_DATABASE_URL"} & for_hub.keys()
