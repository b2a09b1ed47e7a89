"""How the interpreter is set in a server's process, once: its garbage, and whose turn it is.

Python's defaults suit small programs. With 300,000 objects of modules and classes alive, a request
that makes some hundred containers has them all looked through again and again: 8 % of the gateway's
CPU time, in pauses of tens of milliseconds. What is there at the start is left alone for good, and
what comes later is looked at less often. Nothing of a request is a cycle, as far as is known, so
what waits to be found is little.

The event loop lets go of the interpreter's lock with every write to a socket or file, and has it
back after 5 ms where another thread computes: the one that fills the database, mostly.
"""

import gc
import sys

GC_THRESHOLDS = (50_000, 20, 50)
"""So many containers are made and not gone: the young ones are looked at; so often: older ones."""
TURN_S = 0.0005


def settle() -> None:
    """For a process that serves until it ends; never in one that tests share."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(TURN_S)
