"""Which stores the settings ask for, of answers and of what was learnt: the Redis that gateways
share, or this process and its data folder."""

from collections.abc import Callable

from gateway.cache.calibration_files import CalibrationFiles, calibration_folder
from gateway.cache.calibrations import CalibrationStore
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.store import AnswerStore
from gateway.settings import Settings
from gateway.store.redis_answers import RedisAnswers
from gateway.store.redis_calibrations import RedisCalibrations


def open_store(
    settings: Settings,
    now_at: Callable[[], float],
    on_untold: Callable[[], None] = lambda: None,
) -> AnswerStore:
    """Used on one event loop; `close` it at the end. `on_untold`: something that was to be kept or
    counted could not be told in time."""
    if settings.redis_url:
        return RedisAnswers(
            settings.redis_url,
            settings.redis_prefix,
            settings.cache_tenant_max_bytes,
            matrix_max_bytes=settings.cache_max_bytes,
            clock=now_at,
            on_untold=on_untold,
        )
    return MemoryAnswers(settings.cache_max_bytes, settings.cache_tenant_max_bytes, now_at)


def calibrations_beside(store: AnswerStore, settings: Settings) -> CalibrationStore:
    """Where what is learnt of these answers is added up."""
    if isinstance(store, RedisAnswers):
        return RedisCalibrations(store.link)
    return CalibrationFiles(calibration_folder(settings.data_path))


def kind_of(store: AnswerStore) -> str:
    """For operators: memory; or redis, with how it finds the nearest once that is known."""
    if isinstance(store, RedisAnswers):
        return f"redis ({store.matching or 'not met yet'})"
    return "memory"


async def begin(store: AnswerStore) -> None:
    """So that the log says early where Redis is out of reach."""
    if isinstance(store, RedisAnswers):
        await store.start()
