"""How many rows and tokens a step may hold where no setting says: by the device and its memory.

A processor computes few rows at a time, and a longer step only makes others wait. A GPU reads its
weights once a step whatever its rows, so that few rows leave it idle: an H200 decodes 25,600 tokens
a second of 8B with 256 rows and 11,200 with 64 (bench/results/gpu). What bounds a step there is the
memory beside the arena: activations of its tokens and logits of its rows, which
engine/models/reserve.py estimates before a model is loaded.

Rows are never more than tokens.
"""

import msgspec

from engine.config import EngineConfig

CPU_ROWS = 64
CPU_TOKENS = 1024
GPU_ROWS = 256
GPU_TOKENS = 8192
LEAST_GPU_ROWS = 64
LEAST_GPU_TOKENS = 1024
BYTES_A_ROW = 7 << 20
"""Beside the arena: logits of 262,000 tokens and what sampling makes of them."""
BYTES_A_TOKEN = 480 << 10
"""Beside the arena: activations of 32B."""
USED_SHARE = 0.9


def for_cpu(config: EngineConfig) -> EngineConfig:
    """The configuration with what it leaves open."""
    return _chosen(config, CPU_ROWS, CPU_TOKENS)


def for_gpu(config: EngineConfig, reserve_bytes: int) -> EngineConfig:
    """The same, for a GPU with so much memory beside its arena: logits take half of it at most."""
    rows, tokens = GPU_ROWS, GPU_TOKENS
    usable = int(reserve_bytes * USED_SHARE)
    while rows > LEAST_GPU_ROWS and rows * BYTES_A_ROW > usable // 2:
        rows //= 2
    left = usable - (config.max_num_seqs or rows) * BYTES_A_ROW
    while tokens > LEAST_GPU_TOKENS and tokens * BYTES_A_TOKEN > left:
        tokens //= 2
    return _chosen(config, rows, tokens)


def in_words(config: EngineConfig) -> str:
    """As the log and the overview show it."""
    return f"{config.max_num_seqs:,} sequences and {config.max_batch_tokens:,} tokens a step"


def _chosen(config: EngineConfig, rows: int, tokens: int) -> EngineConfig:
    rows = config.max_num_seqs or min(rows, config.max_batch_tokens or rows)
    tokens = config.max_batch_tokens or max(tokens, rows)
    return msgspec.structs.replace(config, max_num_seqs=rows, max_batch_tokens=tokens)
