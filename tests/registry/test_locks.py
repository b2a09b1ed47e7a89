"""File locks between processes of one data folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from registry.locks import LockBusy, hold, is_held


def test_exclusive_keeps_everybody_out(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "x.lock"
    assert not is_held(path)
    with hold(path):
        assert is_held(path)
        with pytest.raises(LockBusy), hold(path, timeout_s=0.12):
            pass
        with pytest.raises(LockBusy), hold(path, shared=True):
            pass
    assert not is_held(path)


def test_shared_lets_others_share(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with hold(path, shared=True), hold(path, shared=True), pytest.raises(LockBusy), hold(path):
        pass
    with hold(path):
        pass


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with hold(path, shared=True) as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,)
        )
    with pytest.raises(LockBusy), hold(path):
        pass
    child.communicate(b"\n")
    with hold(path):
        pass
