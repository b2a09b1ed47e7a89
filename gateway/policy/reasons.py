"""The words for decisions: kinds, reasons, and the figures they were based on (pure).

Policies say them, decisions.py keeps them, operators and metrics read them.
"""

from typing import Literal, TypeAlias, TypedDict

Kind: TypeAlias = Literal["load", "held", "warm", "unload", "eviction", "refusal", "quarantine"]
Reason: TypeAlias = Literal[
    # load, warm
    "free pages",  # room that costs nobody
    "idle models make room",
    "models at rest make room",  # in demand, and at work for nobody at this moment
    "worth more",  # than a busy model, by margin and residence
    "gathered",  # enough waits that the load pays
    "bound reached",  # the oldest has waited as long as it may
    "turn",  # its turn against busy models within the load budget
    "replica",  # the backlog would take longer than one more load
    "pinned",
    "operator",
    "prefetch",  # nobody waits yet
    # held
    "gathering",  # until the load pays or the oldest has waited as long as it may
    "load budget",  # loads that push busy models out have had their share of the time
    "no room",  # pinned models, or floors, hold what it would need
    "loads under way",  # the worker moves others at the moment
    "nobody gives way",  # the worker's own look: every model there is worth more
    "no worker",  # none is connected
    # unload, eviction
    "kv",  # others need KV memory
    "load",
    # refusal
    "tenant queue full",
    "queue full",
    "eta beyond bound",  # the wait foreseen is longer than what the request may wait
    "queue timeout",  # it waited as long as it may
    "model failed",
    # quarantine
    "workers died",
    "lifted",
]


class Figures(TypedDict, total=False):
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
    score            of the newcomer, as the candidates have theirs
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
