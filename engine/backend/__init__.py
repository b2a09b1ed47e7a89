"""Devices: one arena of bytes, steps in order, copies and fences.

`base.py` is the seam; the CPU and the GPU are siblings behind it. Nothing here knows pages, models
or requests.
"""

from engine.backend.base import Backend, Pending
from engine.backend.cpu import CpuBackend
from engine.backend.cuda import CudaBackend, Mover
from engine.backend.cuda_device import CudaDevice, gpu_names
from engine.backend.device import Device, Event, Graph

__all__ = [
    "Backend",
    "CpuBackend",
    "CudaBackend",
    "CudaDevice",
    "Device",
    "Event",
    "Graph",
    "Mover",
    "Pending",
    "gpu_names",
]
