"""Which requests run in the next step, and the steps on their way to the device and back."""

from engine.scheduling.queues import Deadlines, ModelQueue
from engine.scheduling.scheduler import STEP_TOKENS, Scheduler
from engine.scheduling.step_pipeline import Charges, Collected, SampledToken, StepPipeline, services

__all__ = [
    "STEP_TOKENS",
    "Charges",
    "Collected",
    "Deadlines",
    "ModelQueue",
    "SampledToken",
    "Scheduler",
    "StepPipeline",
    "services",
]
