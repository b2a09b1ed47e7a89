"""The file of master keys: drawn once, read by all, and refused with a reason."""

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.sealing.master_keys import MasterKey, SealKeyError, ensure_keys, read_keys
from gateway.settings.settings import Settings


def test_it_is_drawn_once_for_all(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))
    start = threading.Barrier(8)

    def read(_: int) -> list[MasterKey]:
        start.wait()
        return ensure_keys(settings)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(8)))
    assert all(keys == found[0] for keys in found)
    assert len(found[0][0].key) == 32
    [path] = (tmp_path / "data").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ensure_keys(Settings(data_dir=str(tmp_path / "other"))) != found[0]


def test_another_file_is_shared_by_servers(tmp_path: Path) -> None:
    shared = tmp_path / "keys.json"
    settings = Settings(data_dir=str(tmp_path / "data"), seal_keys_file=str(shared))
    with pytest.raises(SealKeyError, match=r"seal_keys_file: .*does not exist"):
        ensure_keys(settings)
    keys = ensure_keys(Settings(data_dir=str(tmp_path / "first")))
    (tmp_path / "first" / "seal-keys.json").rename(shared)
    assert read_keys(settings) == keys


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"keys": []}',
        '{"keys": [{"id": "0123456789ab", "key": "AAAA"}]}',
        '{"keys": [{"id": "x.y", "key": "' + "A" * 43 + '="}]}',
        '{"keys": [{"id": "0123456789ab\\n", "key": "' + "A" * 43 + '="}]}',
        "\udcff",
    ],
)
def test_a_damaged_file_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seal-keys.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SealKeyError, match="put it back from a backup"):
        read_keys(Settings(data_dir=str(tmp_path)))


def test_two_keys_with_one_id_are_refused(tmp_path: Path) -> None:
    """The second would take the place of the first, and a rotation have no effect."""
    key = '{"id": "0123456789ab", "key": "' + "A" * 43 + '="}'
    (tmp_path / "seal-keys.json").write_text(f'{{"keys": [{key}, {key}]}}')
    with pytest.raises(SealKeyError, match="two keys with one id"):
        read_keys(Settings(data_dir=str(tmp_path)))


def test_only_who_starts_the_server_draws_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process would seal with keys that no other one has."""
    settings = Settings(data_dir=str(tmp_path))
    with pytest.raises(SealKeyError, match=r"seal-keys\.json does not exist"):
        read_keys(settings)
    assert not list(tmp_path.iterdir())
    caplog.set_level("INFO")
    keys = ensure_keys(settings)
    assert "back it up" in caplog.text
    caplog.clear()
    assert ensure_keys(settings) == read_keys(settings) == keys
    assert not caplog.text
    (tmp_path / "seal-keys.json").chmod(0o640)
    ensure_keys(settings)
    assert "others may read the master keys" in caplog.text
