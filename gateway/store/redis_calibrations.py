"""Calibrations in the Redis that gateways share: one small key for each tenant and model, added to
by answers.lua in one step. See gateway/cache/calibrations.py for the seam.

Like everything of that script they belong to one run of Redis: one that was started anew may have
come back without the last invalidations.
"""

from gateway.cache.calibrations import Owner, decode, encode
from gateway.cache.types import Epoch
from gateway.policy.cache_confidence import MEMORY, Calibration
from gateway.store.redis_answers import WRITE_TIMEOUT_S, quoted
from gateway.store.redis_link import RedisLink

KEPT_S = 30 * 24 * 3600
"""From when it was last used."""


class RedisCalibrations:
    """Implements CalibrationStore."""

    def __init__(self, link: RedisLink, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """`link`: the answers', who close it."""
        self._link = link
        self._timeout_s = timeout_s

    async def exchange(
        self, owner: Owner, epoch: Epoch, learned: Calibration
    ) -> Calibration | None:
        """See CalibrationStore."""

        async def ask() -> Calibration | None:
            names = (quoted(owner.tenant_id), owner.model_name)
            asked = (epoch, owner.rule, encode(learned), int(MEMORY), KEPT_S * 1000)
            _, _, (is_current, counts) = await self._link.call("teach", *names, *asked)
            return decode(counts) if is_current else None

        return await self._link.within(self._timeout_s, ask)

    async def forget(self, tenant_id: str, model_name: str) -> None:
        """See CalibrationStore. What belongs to one of them alone has been invalidated with it."""
        if not (tenant_id and model_name):
            return

        async def ask() -> None:
            await self._link.call("unteach", quoted(tenant_id), model_name)

        await self._link.within(self._timeout_s, ask)
