"""Key pairs: drawn once, kept to this user, and a damaged file says what to do."""

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.settings.worker_settings import CURVE_KEY_OR_NONE
from gateway.workers.curve_keys import FILE, KeyFileError, KeyPair, key_pair


def test_one_pair_is_drawn_for_all_who_come_first(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with ThreadPoolExecutor(8) as threads:
        pairs = set(threads.map(key_pair, [folder] * 32))
    (pair,) = pairs
    assert len(pair.public_key) == len(pair.secret_key) == 40
    assert pair.public_key != pair.secret_key
    assert [path.name for path in folder.iterdir()] == [FILE]
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600


def test_every_key_passes_the_settings(tmp_path: Path) -> None:
    for number in range(50):
        assert re.match(CURVE_KEY_OR_NONE, key_pair(tmp_path / str(number)).public_key)


def test_a_key_is_never_taken_for_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter([(b"-" + b"k" * 39, b"s" * 40), (b"k" * 40, b"t" * 40)])
    monkeypatch.setattr("zmq.curve_keypair", lambda: next(drawn))
    assert key_pair(tmp_path) == KeyPair("k" * 40, "t" * 40)


@pytest.mark.parametrize(
    "text", [b"{", b"\xff", b'{"public_key": "\xff"}', b'{"public_key": "k", "secret_key": "s"}']
)
def test_a_damaged_file_says_what_to_do(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(KeyFileError, match="put it back from a backup, or delete it"):
        key_pair(tmp_path)
