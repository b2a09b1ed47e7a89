"""When a server that does not answer is left alone, and when it is tried again. Pure.

closed   it is asked; a broken connection, or `max_late` answers in a row that came too late, open
open     it is not asked, but for one probe at a time: after `first_s`, then twice as long each
         time up to `longest_s`; a probe that succeeds closes
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """See above. The caller says what happened and when, by a clock that never runs backwards."""

    max_late: int = 3
    first_s: float = 0.1
    longest_s: float = 1.0
    is_open: bool = False
    num_late: int = 0
    wait_s: float = 0.0
    probe_at_s: float = 0.0

    def succeeded(self) -> None:
        """An answer came in time."""
        self.is_open, self.num_late, self.wait_s = False, 0, 0.0

    def failed(self, now_s: float, is_late: bool) -> bool:
        """No answer: late, or none to come. True where that opens it."""
        if self.is_open:
            return False
        self.num_late += 1
        if is_late and self.num_late < self.max_late:
            return False
        self.is_open, self.wait_s = True, self.first_s
        self.probe_at_s = now_s + self.wait_s
        return True

    def probe_failed(self, now_s: float) -> None:
        """Still none."""
        self.wait_s = min(self.longest_s, self.wait_s * 2)
        self.probe_at_s = now_s + self.wait_s
