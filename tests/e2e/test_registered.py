"""What a real registration leaves behind: packs on disk as the catalog has them, and what it says.

The registrations are those of this room's fixture; no server runs here.
"""

from pathlib import Path

import msgspec
import pytest

from engine.protocol import PACK_VERSION
from tests.e2e.conftest import Prepared
from tests.e2e.folders import REFUSED
from tests.e2e.server import polyhost, polyhost_json

pytestmark = pytest.mark.e2e


def test_a_models_pack_is_as_the_catalog_says(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    model = polyhost_json(data_dir, "models", "show", "shakespeare")
    pack = data_dir / "packs" / model["pack"]
    assert model["weight_bytes"] == (pack / "weights.bin").stat().st_size
    index = pack / "index.msgpack"
    assert index.exists()
    update = "polyhost models update shakespeare"
    assert update not in polyhost(data_dir, "models", "list").stdout
    index.unlink()  # the copy shares its bytes with other tests
    index.write_bytes(msgspec.msgpack.encode({"version": PACK_VERSION - 1}) + bytes(8))
    assert update in polyhost(data_dir, "models", "list").stdout


@pytest.mark.parametrize("name", REFUSED)
def test_dangerous_folders_are_refused_with_the_reason(prepared: Prepared, name: str) -> None:
    shown = polyhost_json(prepared.data_dir, "models", "show", name)
    assert shown["state"] == "failed"
    assert name in shown["reason_code"] + shown["reason"]
