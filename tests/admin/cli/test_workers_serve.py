"""`polyhost workers serve`: what its options may be, and what is said of others."""

from pathlib import Path

import pytest

from admin.cli.main import main
from gateway.server import worker_home

KEY = "?.KXv*^HDCjF+hZM@)/{MfXc.z9sJ0Rw9knzIL}}"


@pytest.mark.parametrize(
    ("listen", "key", "said"),
    [
        ("10.0.0.5", KEY, "'10.0.0.5' is no address with a port, such as 10.0.0.5:7600"),
        (":7600", KEY, "no address"),
        ("10.0.0.5:port", KEY, "no address"),
        ("10.0.0.5:65536", KEY, "no address"),
        ("10.0.0.5:7600", KEY[1:], "is no key: run `polyhost workers key` on the server's machine"),
        ("10.0.0.5:7600", "%s" + KEY, "is no key"),
    ],
)
def test_what_is_no_address_or_no_key_is_said_in_words(
    capsys: pytest.CaptureFixture[str], listen: str, key: str, said: str
) -> None:
    assert main(["workers", "serve", "--listen", listen, f"--server-key={key}"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("listen", ["[fd00::5]:7600", "10.0.0.5:7600", "machine-5:7600"])
def test_the_home_gets_address_keys_and_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    given: list[tuple[object, ...]] = []

    async def serve_workers(_settings: object, *more: object) -> None:
        given.append(more)

    monkeypatch.setattr(worker_home, "serve_workers", serve_workers)
    words = ["--data-dir", str(tmp_path), "--listen", listen, f"--server-key={KEY}"]
    assert main(["workers", "serve", *words]) == 0
    host = listen.rpartition(":")[0].strip("[]")
    assert given == [(host, 7600, [KEY], tmp_path / "packs")]
