"""How fast gateways that share limits notice each other, and for how long they wait. Pure data of
store/shared.py; when Redis itself is tried again is breaker.py's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. `beat_s`: how often a gateway says that it lives; one that was silent for `lease_s`
    is dead, and its places are free. What a dead gateway's requests may still cost is counted for
    `orphan_s` at most. After a loss all gateways have told within `grace_s` what is open and
    posted; one restores, for `lock_s` at most. `reconcile_s`: how often what Redis holds in our
    name is compared with what we hold."""

    beat_s: float = 1.0
    lease_s: float = 10.0
    orphan_s: float = 3600.0
    grace_s: float = 3.0
    lock_s: float = 30.0
    reconcile_s: float = 10.0


PACE = Pace()
