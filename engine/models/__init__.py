"""The models of one engine: names, runners, queues, and what may still be submitted to them.

Joins residency (whose weights are there) and scheduling (who wants to run) for `engine/engine.py`.
"""

from engine.models.model_manager import AnyRunner, MakeRunner, ModelManager
from engine.models.status import make_layout, make_status

__all__ = ["AnyRunner", "MakeRunner", "ModelManager", "make_layout", "make_status"]
