"""From a folder or a hub's repository to a checkpoint pack: fetched, checked, converted, probed.

A program of its own (`python -m engine.registration.main`); nothing of it is needed to serve.
"""

__all__: list[str] = []
