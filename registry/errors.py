"""The registry's error tree. Messages are one line and say what to do; callers may show them as is.

RegistryError
+-- NotFound           no such tenant, key, model or price
+-- AlreadyExists      the name (or key) is taken
+-- InvalidValue       a value outside what the column means
+-- IllegalTransition  a state change outside the model's state table; nothing was changed
+-- SchemaError        the database is missing, older or newer than this build
+-- WrongDatabase      the data folder belongs to another database; nothing was changed
+-- Forbidden          who asks may not do this
+-- RegistryBusy       somebody else is changing it; nothing was changed, it may be tried again
+-- RegistryAway       the database does not answer; whether anything was changed is not known
"""


class RegistryError(Exception):
    """Base of everything the registry raises on purpose."""


class NotFound(RegistryError):
    """The thing named does not exist."""


class AlreadyExists(RegistryError):
    """The name is taken."""


class InvalidValue(RegistryError):
    """The value cannot be stored."""


class IllegalTransition(RegistryError):
    """A state change outside the table; nothing was changed."""


class SchemaError(RegistryError):
    """The database does not have the schema this build needs."""


class WrongDatabase(RegistryError):
    """The data folder belongs to another database; nothing was changed."""


class RegistryBusy(RegistryError):
    """Others are changing the registry and took too long; nothing was changed."""


class RegistryAway(RegistryError):
    """The database does not answer; whether anything was changed is not known."""


class Forbidden(RegistryError):
    """Who asks may not do this."""
