"""Python's garbage collector in a worker: imports are kept out of what it walks over.

Torch and transformers leave 400,000 objects, and a full collection walks over all of them: 0.1 to
0.35 s in which no model takes a step. Frozen objects are never looked at again.
"""

import gc


def settle() -> None:
    """For a process that serves until it ends, once it has imported; never one that tests share."""
    gc.collect()
    gc.freeze()
