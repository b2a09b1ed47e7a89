"""Fixtures of the engine's tests."""

import pytest

from tests.engine.encoder_rig import TinyEncoder, classifier_configs, family_configs, make_encoders
from tests.engine.tiny_models import TinyModel, make_tiny_models


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Packs of three families, made once."""
    return make_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyEncoder]:
    """Two that embed and two that classify, made once."""
    root = tmp_path_factory.mktemp("encoders")
    embeds, classes = family_configs(), classifier_configs()
    made = make_encoders(root / "a", {name: embeds[name] for name in ("bert", "modernbert")})
    return made | make_encoders(
        root / "b", {name: classes[name] for name in ("distilbert", "xlm-roberta")}, classify=True
    )
