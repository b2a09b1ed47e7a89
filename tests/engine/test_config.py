"""A worker's configuration: JSON there and back, and what it refuses."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig, WorkerConfig, auto_page_bytes, decode_worker_config

ENGINE = {"arena_bytes": 64 << 20, "shm_prefix": "p"}
WORKER = {"worker_id": "w", "endpoint": "ipc:///tmp/w.sock", "engine": ENGINE}


def decode(**changes: Any) -> WorkerConfig:
    return decode_worker_config(msgspec.json.encode({**WORKER, **changes}).decode())


def test_there_and_back() -> None:
    config = decode(parent_pid=7)
    assert config.engine.max_num_seqs == 64
    assert decode_worker_config(msgspec.json.encode(config).decode()) == config


@given(st.integers(1 << 20, 1 << 40))
def test_automatic_pages(arena_bytes: int) -> None:
    page_bytes = auto_page_bytes(arena_bytes)
    assert page_bytes & (page_bytes - 1) == 0
    assert 64 << 10 <= page_bytes <= 2 << 20
    if page_bytes > 64 << 10:
        assert arena_bytes // page_bytes >= 1024
    if page_bytes < 2 << 20:
        assert arena_bytes // (2 * page_bytes) < 1024
    config = EngineConfig(arena_bytes=arena_bytes, shm_prefix="p")
    assert config.resolved_page_bytes == page_bytes
    assert config.num_pages == arena_bytes // page_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "inproc://w"}, "ipc://"),
        ({"endpoint": "tcp://0.0.0.0:1"}, "needs secret_key"),
        ({"endpoint": "tcp://0.0.0.0:1", "secret_key": "k" * 40}, "at least one of allowed_keys"),
        (
            {"endpoint": "tcp://0.0.0.0:1", "secret_key": "k" * 40, "allowed_keys": ["k" * 39]},
            "of 40 characters",
        ),
        ({"worker_id": ""}, "worker_id"),
        ({"status_interval_s": 0}, "status_interval_s"),
        ({"status_interval_s": 3.0}, "lease_ttl_s"),
        ({"parent_pid": -1}, "parent_pid"),
        ({"max_peers": 0}, "must be at least 1"),
        ({"colour": "blue"}, "colour"),
        ({"engine": {**ENGINE, "arena_bytes": 1}}, "at least one page"),
        ({"engine": {**ENGINE, "steps_ahead": 2}}, "steps_ahead"),
        ({"engine": {**ENGINE, "tenant_kv_share": 0.0}}, "tenant_kv_share"),
        ({"engine": {**ENGINE, "kv_low_watermark": 0.2}}, "kv_high_watermark"),
        ({"engine": {**ENGINE, "request_timeout_s": -1.0}}, "request_timeout_s"),
        ({"engine": {**ENGINE, "page_bytes": 3 << 12}}, "power of two"),
        ({"engine": {**ENGINE, "shm_prefix": "../x"}}, "shm_prefix"),
        ({"engine": {**ENGINE, "block_tokens": 0}}, "block_tokens"),
        ({"engine": {**ENGINE, "max_batch_tokens": 63}}, "raise the first or lower the second"),
        ({"engine": {**ENGINE, "host_tier_bytes": -1}}, "host_tier_bytes"),
        ({"engine": {"shm_prefix": "p"}}, "arena_bytes"),
    ],
)
def test_refused_with_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        decode(**change)
