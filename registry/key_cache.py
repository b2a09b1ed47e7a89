"""What a key says about cached answers (gateway/policy/cache_rule.py says what it means)."""

import math
from dataclasses import asdict, dataclass

from registry.base import JsonObject
from registry.errors import InvalidValue

CACHE_MODES = ("off", "exact", "semantic", "shadow")


@dataclass(frozen=True, slots=True)
class KeyCache:
    """`max_age_s`, `false_hit_budget` None: the server's own. `sampled`: also answers that are
    drawn without a seed."""

    mode: str = "off"
    max_age_s: float | None = None
    false_hit_budget: float | None = None
    sampled: bool = False

    def check(self) -> None:
        """Raises InvalidValue."""
        if self.mode not in CACHE_MODES:
            raise InvalidValue(f"cache mode must be one of {', '.join(CACHE_MODES)}")
        if self.max_age_s is not None and not 0 <= self.max_age_s < math.inf:
            raise InvalidValue("cached answers may be 0 seconds old or more, not less")
        if self.false_hit_budget is not None and not 0 <= self.false_hit_budget < 1:
            raise InvalidValue("a false-hit budget is a share of hits: 0.01 is one in a hundred")

    def public(self) -> JsonObject:
        """As the audit log and `--json` show it."""
        return {f"cache_{name}": value for name, value in asdict(self).items()}
