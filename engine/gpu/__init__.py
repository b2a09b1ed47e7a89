"""Steps on a device with streams: one copy brings the inputs, decodes are replayed as graphs.

The sibling of `engine/running/` for GPUs; `engine/worker/open_device.py` puts its parts together.
"""

from engine.gpu.device_batch import DeviceLayOut
from engine.gpu.device_runner import DeviceRunner, DeviceTools
from engine.gpu.device_sampling import SAMPLING_KERNELS, SamplingOperations
from engine.gpu.device_step import InputBuffer
from engine.gpu.graphs import StepGraphs

__all__ = [
    "SAMPLING_KERNELS",
    "DeviceLayOut",
    "DeviceRunner",
    "DeviceTools",
    "InputBuffer",
    "SamplingOperations",
    "StepGraphs",
]
