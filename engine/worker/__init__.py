"""The worker process around an engine: `python -m engine.worker.main`.

Opens the device, keeps the socket to the gateways, and tells them what the engine has.
"""

__all__: list[str] = []
