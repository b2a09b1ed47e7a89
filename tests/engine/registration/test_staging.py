"""Links in a source folder: those that stay in it are followed, no other ones."""

import json
import os
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from engine.errors import RegistrationRefused
from engine.registration import staging
from engine.registration.main import Registration, register
from engine.registration.staging import staged
from tests.engine.pack_rig import hf_folder
from tests.engine.registration.test_convert import SHAPE

TEMPLATE = "chat_template.jinja"
WEIGHTS = "model.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "model", LlamaConfig(**SHAPE))


def events(source: Path, dest: Path) -> list[dict[str, Any]]:
    """What a registration says."""
    out = StringIO()
    register(str(source), False, Registration(dest, dest.with_name("downloads")), out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def move_out(source: Path, name: str, to: Path) -> None:
    """The file is a link to another place."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.move(source / name, to / name)
    (source / name).symlink_to(os.path.relpath(to / name, source))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_no_file_of_another_folder_is_read(source: Path, tmp_path: Path, name: str) -> None:
    move_out(source, name, tmp_path / "elsewhere")
    last = events(source, tmp_path / "packs")[-1]
    assert (last["event"], last["code"]) == ("refused", "unsafe_link")
    assert last["message"].startswith(f"{name} in {source} links to a file outside")
    assert not (tmp_path / "packs").exists()


def test_a_template_is_no_way_to_a_file_of_the_system(source: Path, tmp_path: Path) -> None:
    (source / TEMPLATE).symlink_to("/etc/hostname")
    last = events(source, tmp_path / "packs")[-1]
    assert (last["event"], last["code"]) == ("refused", "unsafe_link")


def test_links_within_the_folder_and_in_a_hubs_cache_are_followed(
    source: Path, tmp_path: Path
) -> None:
    move_out(source, WEIGHTS, source / "weights")
    assert events(source, tmp_path / "packs")[-1]["event"] == "ready"
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(source, snapshot)
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        move_out(snapshot, name, repository / "blobs")
    ready = events(snapshot, tmp_path / "packs")[-1]
    assert ready["event"] == "ready"
    pack = Path(ready["pack_dir"])
    assert not any(path.is_symlink() for path in pack.iterdir())
    move_out(snapshot, "config.json", tmp_path / "hub" / "models--org--other" / "blobs")
    assert events(snapshot, tmp_path / "packs")[-1]["code"] == "unsafe_link"


def test_a_link_that_changes_after_it_was_looked_at_changes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (source / TEMPLATE).write_text("hello")
    check = staging._check_place

    def changed(folder: Path, name: str, descriptor: int) -> None:
        check(folder, name, descriptor)
        if name == TEMPLATE:
            (source / name).unlink()
            (source / name).symlink_to(secret)

    monkeypatch.setattr(staging, "_check_place", changed)
    with staged(source, tmp_path / "packs") as folder:
        assert (folder / TEMPLATE).read_text() == "hello"
    assert not (tmp_path / "packs").exists()


def test_what_is_no_file_is_not_there(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / TEMPLATE)
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_text("pickle")
    with staged(source, tmp_path / "packs") as folder:
        assert not (folder / TEMPLATE).exists()
        assert (folder / "modeling_own.py").read_bytes() == b""
        assert (folder / "pytorch_model.bin").read_bytes() == b""
    (source / "generation_config.json").unlink(missing_ok=True)
    (source / "generation_config.json").symlink_to("nowhere")
    with (
        pytest.raises(RegistrationRefused, match="not there"),
        staged(source, tmp_path / "packs"),
    ):
        pass
