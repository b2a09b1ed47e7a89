"""The real engine on a fake device: every part of the GPU's path but the driver and the kernels."""

import random
from dataclasses import fields, replace
from typing import Any

from engine.backend.cuda import CudaBackend
from engine.config import EngineConfig
from engine.gpu.device_sampling import SAMPLING_REFERENCE, SamplingOperations
from engine.worker.open_device import Opened, open_streams
from kernels.decoder_layer import Operations
from kernels.flat_reference import FLAT_REFERENCE
from kernels.mixer_operations import MIXER_REFERENCE, MixerOperations
from kernels.page_copy import page_copy_ref
from tests.engine.fake_device import FakeDevice, opaque

GRAPH_BYTES = 1 << 20


def opaque_operations(operations: Operations) -> Operations:
    """What no recording looks into: a launched kernel is one piece."""
    if operations.few_rows is not None:  # and its kernel stands behind plain products, too
        operations = replace(
            operations,
            product=opaque(operations.product),
            few_rows=opaque(operations.few_rows),
        )
    return replace(
        operations,
        write=opaque(operations.write),
        attend=opaque(operations.attend),
        norm=opaque(operations.norm),
        head_norm_=opaque(operations.head_norm_),
        gate_mul=opaque(operations.gate_mul),
        experts=opaque(operations.experts),
    )


def opened_on(
    device: FakeDevice,
    config: EngineConfig,
    graph_bytes: int = GRAPH_BYTES,
    operations: Operations = FLAT_REFERENCE,
    sampling: SamplingOperations = SAMPLING_REFERENCE,
) -> Opened:
    """A backend over the fake device, with references in the kernels' places."""
    mixers = MixerOperations(
        *(opaque(getattr(MIXER_REFERENCE, field.name)) for field in fields(MIXER_REFERENCE))
    )
    return open_streams(
        device, config, graph_bytes, opaque_operations(operations), sampling, page_copy_ref, mixers
    )


class Poisoner:
    """Overwrites memory of a device at once, whatever is under way: `engine_hooks.Poisons`."""

    def __init__(self, opened: Opened) -> None:
        self._arena = opened.backend.arena

    def poison(self, offset: int, num_bytes: int) -> None:
        """NaN in every float type."""
        self._arena[offset : offset + num_bytes].fill_(0xFF)


def backend_of(opened: Opened) -> CudaBackend:
    """With its own type."""
    assert isinstance(opened.backend, CudaBackend)
    return opened.backend


def lazy_device(rng: random.Random, **settings: Any) -> FakeDevice:
    """Somewhere between eager and as late as can be."""
    return FakeDevice(rng.randrange(1 << 30), lazy=rng.choice((0.2, 0.7, 0.95, 1.0)), **settings)
