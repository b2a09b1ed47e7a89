"""Steps of encoders: whole inputs in one flat batch, a row of floats for each."""

from engine.encoders.encoder_batch import EncoderBatch, build_encoder_batch, split_rows
from engine.encoders.encoder_model import (
    FAMILIES,
    POOLINGS,
    EncoderModel,
    EncoderRunner,
    build_encoder,
    pooled,
)

__all__ = [
    "FAMILIES",
    "POOLINGS",
    "EncoderBatch",
    "EncoderModel",
    "EncoderRunner",
    "build_encoder",
    "build_encoder_batch",
    "pooled",
    "split_rows",
]
