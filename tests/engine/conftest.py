"""Fixtures of the engine's tests."""

import pytest

from tests.engine.models import TinyModel, make_tiny_models


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Packs of three families, made once."""
    return make_tiny_models(tmp_path_factory.mktemp("models"))
