"""The reasons for decisions: kinds, reason codes, and the figures behind them (pure).

Policies give them, decisions.py keeps them, operators and metrics show them.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, TypedDict

Kind: TypeAlias = Literal["load", "held", "warm", "unload", "eviction", "refusal", "quarantine"]
Reason: TypeAlias = Literal[
    # load, warm
    "free memory",  # no model has to leave
    "idle models evicted",
    "inactive models evicted",  # they are in demand, but run no request at this moment
    "higher value",  # than the busy model that leaves, by margin and residence
    "enough requests waiting",  # the load pays
    "maximum wait reached",  # by the oldest request
    "next in line",  # its turn against busy models within the load budget
    "replica",  # the backlog would take longer than one more load
    "pinned",
    "operator",  # an operator asked for it
    "prefetch",  # no request waits yet
    "batch requests waiting",  # of class batch alone; nothing in demand leaves
    # held
    "too few requests waiting",  # until the load pays or the oldest has waited long enough
    "load budget used up",  # loads that evict busy models have used their share of the time
    "not enough memory",  # pinned models, or memory floors, hold what it would need
    "other loads in progress",  # on the same worker
    "no model can be evicted",  # the worker's own finding: a rule keeps every model there
    "no worker connected",
    # unload, eviction
    "kv",  # other models need KV memory
    "load",  # another model needs memory for its weights
    "surplus replica",  # the other copies are enough for what the model is asked for
    # refusal
    "tenant queue full",
    "queue full",
    "expected wait too long",  # longer than the request may wait
    "queue timeout",  # it waited as long as it may
    "model failed",
    # quarantine
    "workers crashed",
    "lifted",
]

WaitCode: TypeAlias = Literal[
    "no worker connected",
    "workers drained",
    "model failed",
    "loading",
    "too few requests waiting",
    "load budget used up",
    "not enough memory",
    "other loads in progress",
    "no model can be evicted",
    "load not decided yet",
    "behind older requests",
    "worker held",
    "capacity reserved",
    "worker not responding",
    "worker full",
    "not enough KV memory",
    "next",
    "running",
]
"""Why a request waits (dispatch/explain.py)."""

LoadOutcome: TypeAlias = Literal[
    "chosen",
    "not enough memory",  # even if all models left that may
    "models would have to leave",  # the chosen one has free memory
    "models in demand would have to leave",  # the chosen one has idle ones
    "begins later",
    "pushes more out",
    "loads from disk",  # the chosen one has the model in host memory
    "less free memory",
    "its models are worth more",
    "equal",
]
"""What became of a worker where a model was to be loaded (policy/load_options.py)."""

GrantReason: TypeAlias = Literal[
    "lowest cost",  # in seconds: what runs there, and the part of the prompt to read
    "fewest requests",  # nothing of the prompt is known to be anywhere
    "first with room",  # others would have been better
]
GrantOutcome: TypeAlias = Literal[
    "chosen",
    "higher cost",
    "more requests",
    "equal",
    "capacity reserved",
    "worker full",
    "not enough KV memory",
    "worker not responding",
]
"""What became of a worker where a request was to be granted (dispatch/grant_choices.py)."""

REASONS_BEFORE_0_2: Final[Mapping[str, str]] = {
    "free memory": "free pages",
    "idle models evicted": "idle models make room",
    "inactive models evicted": "models at rest make room",
    "higher value": "worth more",
    "enough requests waiting": "gathered",
    "maximum wait reached": "bound reached",
    "next in line": "turn",
    "too few requests waiting": "gathering",
    "load budget used up": "load budget",
    "not enough memory": "no room",
    "other loads in progress": "loads under way",
    "no model can be evicted": "nobody gives way",
    "no worker connected": "no worker",
    "expected wait too long": "eta beyond bound",
    "workers crashed": "workers died",
}
"""Reason codes that were renamed: the metric `polyhost_decisions_total` keeps the old ones until
0.3, for dashboards and alerts that name them."""

OUTCOMES: Final[Mapping[str, str]] = {
    "evicted": "evicted",
    "drains": "leaves when its requests have ended",
    "kept: pinned": "kept: pinned",
    "kept: floor": "kept: the memory floor of its tenant",
    "kept: first use": "kept: no request served since it was loaded",
    "kept: residence": "kept: loaded too recently",
    "kept: margin": "kept: worth more than the new model",
    "kept: busy": "kept: running requests",
    "kept: claimed": "kept: a waiting request needs its memory",
    "kept: not needed": "kept: others freed enough memory",
}
"""What became of a model when memory was needed (engine.protocol.Outcome), for readers."""


class DecisionFigures(TypedDict, total=False):
    """What a decision was based on; each kind has those that it looked at. Seconds, bytes, counts.

    waited_s         of the oldest request for the model
    bound_s          what it may wait
    until_s          when this ends at the latest, on the dispatcher's clock
    eta_s            from then until the model is there, or a request's turn, as foreseen
    load_s           what the load takes, as foreseen
    backlog_s        predicted service that waits for the model
    demand           device seconds a second, decayed
    num_waiting      requests
    queue_limit      what `num_waiting` ran into
    weight_bytes     of the model
    free_bytes       of the worker
    pages_short      what an eviction is for
    score            of the incoming model, as the candidates have theirs
    load_share       of the worker's time, by loads that pushed busy models out
    retry_after_s    as told to the client
    term_s           of a quarantine
    """

    waited_s: float
    bound_s: float
    until_s: float
    eta_s: float
    load_s: float
    backlog_s: float
    demand: float
    num_waiting: int
    queue_limit: int
    weight_bytes: int
    free_bytes: int
    pages_short: int
    score: float
    load_share: float
    retry_after_s: float
    term_s: float
