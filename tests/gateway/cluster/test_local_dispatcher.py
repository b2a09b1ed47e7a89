"""Gateway and dispatcher in one process: what differs from several."""

import pytest

from gateway.errors import QUEUE_FULL, ApiError
from gateway.settings.settings import Settings
from tests.gateway.scripted_worker import Rig, hosted, prepared, principal


def test_what_the_dispatcher_would_refuse_is_refused_at_once() -> None:
    """Nothing is written for it: the ledger opens its record behind this call."""
    rig = Rig(Settings(max_queue_per_tenant=1, max_queue_total=1))
    rig.local.run(prepared("a"), principal("t"))
    rig.deliver()
    with pytest.raises(ApiError) as refused:
        rig.local.run(prepared("b"), principal("t"))
    assert refused.value.kind == QUEUE_FULL
    assert rig.dispatcher.snapshot().num_queue_rejections == 1


async def test_a_request_that_a_catalog_overtakes_is_answered() -> None:
    rig = Rig()
    rig.worker()
    stream = rig.local.run(prepared("r"), principal("t"))
    rig.local.set_catalog([hosted("n")])
    rig.deliver()
    with pytest.raises(ApiError, match="'m'"):
        await anext(stream)
    rig.dispatcher.check_integrity()


def test_what_was_asked_for_before_the_end_is_finished() -> None:
    rig = Rig()
    worker = rig.worker()
    rig.local.run(prepared("r"), principal("t"))
    rig.local.begin_drain()
    rig.deliver()
    assert worker.submitted == ["r"]
    assert not rig.local.ready
    with pytest.raises(ApiError, match="shutting down"):
        rig.local.run(prepared("s"), principal("t"))
