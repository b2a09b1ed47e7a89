"""What becomes of a request whose model's files took more than they may, and of the next ones."""

from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.text.codecs import Codecs
from gateway.text.offences import FIRST_S
from gateway.text.prepare_messages import EncodePrompt, Ids, LoadText
from gateway.types import HostedModel
from tests.gateway.edge_kit import hosted_model, write_model
from tests.gateway.prepare_kit import InlinePool


class Rig:
    def __init__(self, folder: Path) -> None:
        write_model(folder)
        self.model: HostedModel = hosted_model(folder)
        self.pool = InlinePool()
        self.now_s = 0.0
        self.blamed: list[str] = []
        self.codecs = Codecs(self.pool, 4, lambda: self.now_s, self.blamed.append)

    async def ask(self, tenant_id: str) -> object:
        job = EncodePrompt(self.model.pack_dir, "the game", 100)
        return await self.codecs.ask(self.model, job, tenant_id)


async def test_the_tenant_does_not_ask_again_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path)
    rig.pool.spent = "more CPU time than a request may take"
    for num_jobs in (1, 1):
        with pytest.raises(ApiError, match="more CPU time") as caught:
            await rig.ask("attacker")
        assert caught.value.kind.code == "model_failed"
        assert caught.value.retry_after_s == FIRST_S
        assert len(rig.pool.jobs) == num_jobs, "it costs one process, not one each time"
    assert rig.blamed == [rig.model.name]
    assert "tenant attacker to model tiny" in caplog.text
    assert isinstance(await rig.ask("other"), Ids)
    assert rig.pool.jobs[-1][1], "the model is kept from the process for short jobs"
    rig.now_s = FIRST_S
    assert isinstance(await rig.ask("attacker"), Ids)


async def test_a_model_whose_files_end_the_process_is_not_read_for_every_request(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.pool.spent = "more memory than a request may take"
    for tenant_id in ("a", "b"):
        with pytest.raises(ApiError, match="more memory"):
            await rig.codecs.text(rig.model)
        with pytest.raises(ApiError, match="more memory"):
            await rig.ask(tenant_id)
    assert rig.pool.count(LoadText) == 1
    rig.now_s = FIRST_S
    assert (await rig.codecs.text(rig.model)).stop_token_ids


async def test_tokens_that_the_model_does_not_have_end_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [1000000000000000000000000000000, -1, 402, 403]}'
    )
    assert (await rig.codecs.text(rig.model)).stop_token_ids == [402]
