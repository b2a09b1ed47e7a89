"""A tiny model of a known shape for benchmarks that run the engine in process."""

import json
from pathlib import Path

import pytest
import torch

from bench import machine, shapes
from tests.bench.test_shapes import SHAPES


def use_tiny_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiny` is the only shape there is, and the machine is not measured."""
    monkeypatch.setattr(machine, "memcpy_seconds", lambda num_bytes, repeats=5: 1.0)
    torch.set_num_threads(1)
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"tiny": SHAPES["llama"]}), encoding="utf-8")
    known = shapes.read_shapes(path)
    monkeypatch.setattr(shapes, "read_shapes", lambda: known)
