"""How the interpreter is set in a server's process, once: its garbage, and whose turn it is.

Python's defaults suit small programs. With 300,000 objects of modules and classes alive, a request
that makes some hundred containers has them all looked through again and again: 8 % of the gateway's
CPU time, in pauses of tens of milliseconds. What is there at the start is left alone for good, and
what comes later is looked at in small parts, and all of it seldom. So an answered request must
be no cycle, or prompts wait to be found: what it is made of lets go at its end (`Exchange._close`,
`RequestStream.finish`, `BoundedHttp.connection_lost`). Connections that end amid an answer are
cycles, of some thirty small objects each, and so are requests that failed after they had begun.

A pass stops the event loop for as long as there are young containers, so their number is the length
of the pause: with 50,000 it was 16 to 36 ms of CPU, and more over the middle generation. With 2,000
there are more passes, which together cost no more. All is looked at when a million have been made
and not gone: what is left of some 30,000 such connections at most.

The event loop lets go of the interpreter's lock with every write to a socket or file, and has it
back after 5 ms where another thread computes: the one that fills the database, mostly.
"""

import gc
import sys

GC_THRESHOLDS = (2_000, 10, 50)
"""So many containers are made and not gone: the young ones are looked at; so often: older ones."""
TURN_S = 0.0005


def settle() -> None:
    """For a process that serves until it ends; never in one that tests share."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(TURN_S)
