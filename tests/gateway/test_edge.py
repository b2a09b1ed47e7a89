"""What runs beside the HTTP edge: tokenizers read before anybody asks, and what becomes of that."""

import asyncio
import threading
from pathlib import Path

import pytest

from gateway.prepare import codecs
from gateway.prepare.tokenization import TextCodec, load_codec
from tests.gateway.edge_kit import make_kit

PATIENCE_S = 20.0


class Loads:
    """Stands for `load_codec`; `hold` keeps a load from ending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: list[Path] = []
        self.begun = threading.Event()
        self.hold = threading.Event()
        self.hold.set()
        monkeypatch.setattr(codecs, "load_codec", self._load)

    def _load(self, folder: Path) -> TextCodec:
        self.folders.append(folder)
        self.begun.set()
        assert self.hold.wait(PATIENCE_S)
        return load_codec(folder)


async def test_tokenizers_are_read_before_anybody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(monkeypatch)
    kit = make_kit(tmp_path / "tiny")
    async with kit.edge.running():
        assert await asyncio.to_thread(loads.begun.wait, PATIENCE_S)
        await kit.edge.codecs.text(kit.model)
    assert len(loads.folders) == 1
    await kit.edge.close(1.0)


async def test_a_server_that_stops_waits_for_the_one_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(monkeypatch)
    loads.hold.clear()
    kit = make_kit(tmp_path / "tiny")
    async with kit.edge.running():
        assert await asyncio.to_thread(loads.begun.wait, PATIENCE_S)
    loads.hold.set()
    await kit.edge.close(1.0)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("prepare")]
