"""A step of a generating model: scheduled rows become flat tensors, and a runner computes them.

Here are the batch, the runner's protocol and the runner for the host; `engine/gpu/` has its sibling
for devices with streams, `engine/encoders/` the one for encoders.
"""

from engine.running.batch import (
    InstanceRunner,
    LayOut,
    Runner,
    ScheduledRow,
    Scoring,
    StepBatch,
    build_batch,
    score_positions,
)
from engine.running.fusion import has_experts, recognise
from engine.running.model_runner import ModelRunner

__all__ = [
    "InstanceRunner",
    "LayOut",
    "ModelRunner",
    "Runner",
    "ScheduledRow",
    "Scoring",
    "StepBatch",
    "build_batch",
    "has_experts",
    "recognise",
    "score_positions",
    "state_batch",
]
