"""Models with other memory than K and V, in every form of pack: each request comes to its end.

The probe compares in float32. What a family keeps in float32 beside bfloat16, and which types the
kernels take, shows here.
"""

from pathlib import Path

import pytest

from bench.family_configs import tiny_config
from engine.errors import RegistrationRefused
from engine.modules.experts import expert_weights
from engine.registration.convert import DtypeChoice, inspect, write_pack
from engine.registration.parity import probe
from tests.engine.test_engine import Driver
from tests.engine.test_engine_states import end, tokens
from tests.engine.tiny_models import TinyModel, save_folder, state_configs

DTYPES: tuple[DtypeChoice, ...] = ("bfloat16", "float16", "int8", "int4", "fp8")
FAMILIES = {
    **state_configs(),
    **{name: tiny_config(name) for name in ("bailing_hybrid", "jamba", "minimax", "deepseek_v3")},
    **{name: tiny_config(name) for name in ("deepseek_v32", "minimax_m3_vl_text")},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_end_as_they_should(name: str, dtype: DtypeChoice, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    reference = save_folder(FAMILIES[name], folder, 0)
    candidate = inspect(folder)
    if dtype == "fp8" and expert_weights(candidate.blueprint.skeleton):
        with pytest.raises(RegistrationRefused, match="not supported for mixtures of experts"):
            write_pack(candidate, tmp_path / "packs", dtype, lambda *_: None)
        return
    pack_dir, _ = write_pack(candidate, tmp_path / "packs", dtype, lambda *_: None)
    driver = Driver({name: TinyModel(name, folder, pack_dir, reference)}, 3000)
    driver.make_resident(name)
    asked = {f"r{i}": tokens(i, count) for i, count in enumerate((20, 1, 9))}
    for request, prompt in asked.items():
        driver.submit(request, name, prompt, 6)
    driver.run(lambda: asked.keys() <= driver.finishes.keys())
    for request in asked:
        assert driver.finishes[request].reason == "length", driver.finishes[request].error
    end(driver)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["jamba", "falcon_mamba", "mamba2", "qwen3_next"])
def test_rounded_hybrids_pass_the_probe(name: str, quantization: str) -> None:
    assert probe(tiny_config(name), quantization=quantization) < 1e-4
