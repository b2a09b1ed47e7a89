"""`polyhost serve`: which options become which settings."""

from pathlib import Path

import pytest

from gateway.cli.main import main
from gateway.server import supervisor
from gateway.settings import Settings


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of every server started; none of them really starts."""
    monkeypatch.chdir(tmp_path)
    started: list[Settings] = []

    async def serve(settings: Settings) -> None:
        started.append(settings)

    monkeypatch.setattr(supervisor, "serve", serve)
    return started


def test_options_override_settings(served: list[Settings], tmp_path: Path) -> None:
    options = ["--host", "0.0.0.0", "--port", "0", "--device-budget", "1.5GiB", "--demo"]
    more = ["--host-tier", "0", "--threads", "2", "--data-dir", str(tmp_path / "d")]
    assert main(["serve", *options, *more]) == 0
    (settings,) = served
    assert settings == Settings(
        host="0.0.0.0",
        port=0,
        device_budget_bytes=3 << 29,
        demo=True,
        host_tier_bytes=0,
        num_threads=2,
        data_dir=str(tmp_path / "d"),
    )


def test_what_is_not_given_is_left_to_the_file(served: list[Settings], tmp_path: Path) -> None:
    (tmp_path / "polyhost.toml").write_text("port = 9\ndemo = true\n")
    assert main(["serve"]) == 0
    assert (served[0].port, served[0].demo) == (9, True)


def test_a_wrong_setting_is_one_line(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "port" in capsys.readouterr().err
    assert served == []
