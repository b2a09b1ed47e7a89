"""The engine's error tree.

EngineError
+-- OutOfPages          the arena has no pages for this; make room and try again
+-- IntegrityError      an invariant of the pool, cache or residency is broken (a bug)
+-- IllegalTransition   an object was asked to leave its state table (a bug)
+-- StepAbandoned       a step had to do without the tokens of a failed one: computed nothing
+-- RequestRefused      a request the worker will not take; carries a stable `code`
+-- PackError           a checkpoint pack that must not be served
|   +-- ChecksumMismatch
+-- ConstraintRefused   a constraint that is unsupported, too large or impossible
+-- ConstraintBroken    a request's constraint cannot be followed any further
|   +-- ConstraintSpent for what it costs itself; the message is for the client
+-- DeviceUnusable      a device that cannot be used; the message is one line for the operator
+-- DeviceLost          a device that has failed: its memory is lost, and the worker with it
+-- CaptureFailed       steps that cannot be recorded: they are launched one by one
+-- DownloadInterrupted a hub that cannot be reached, or a transfer cut off: may be tried again
+-- RegistrationRefused a model folder that cannot be hosted, with the reason for the operator
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class OutOfPages(EngineError):
    """The pool cannot give the pages asked for."""


class IntegrityError(EngineError):
    """An invariant does not hold. Never caught: the worker dies and is restarted."""


class IllegalTransition(EngineError):
    """A state change outside the table; nothing was changed."""


class StepAbandoned(EngineError):
    """The step before it failed, and it needed that step's tokens. It may be run again."""


class RequestRefused(EngineError):
    """The worker does not take this request. `code` is one of `protocol.RefusalCode`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PackError(EngineError):
    """The pack is missing, of another version, or damaged."""


class ChecksumMismatch(PackError):
    """A chunk's bytes are not those that were written at registration."""


class ConstraintRefused(EngineError):
    """The message is for the client."""


class ConstraintBroken(EngineError):
    """A token it does not allow. The message is for operators."""


class ConstraintSpent(ConstraintBroken):
    """Its matcher is out of fuel: a constraint too costly for where the output has come to.

    is_shared: what ran out is a store that other requests have drawn on, too.
    """

    def __init__(self, reason: str, is_shared: bool = False) -> None:
        super().__init__(reason)
        self.is_shared = is_shared


class DeviceUnusable(EngineError):
    """No driver, one too old, an unsupported GPU, too little memory: said in one line."""


class DeviceLost(EngineError):
    """Never caught: the worker dies and is restarted."""


class CaptureFailed(EngineError):
    """Nothing was recorded and nothing has run."""


class CapturesEnded(CaptureFailed):
    """The device records nothing more: too many captures of others were broken off."""


class DownloadInterrupted(EngineError):
    """The network's or the hub's fault, so far as is known. The message is for the operator."""


class RegistrationRefused(EngineError):
    """The source cannot become a hosted model. `code` is stable, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
