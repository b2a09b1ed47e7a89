"""What an operation is: one typed function, its permission, and the audit entries it leaves.

    @operation("keys.write", on="tenant", audit=("key.create",))
    def create_key(context: OperatorContext, tenant: str, name: str) -> tuple[KeyRecord, str]: ...

Commands and pages call operations and nothing below them. The parameters after the first and the
result are those of the signature; admin/table.py lists all operations. The decorator checks the
permission before the function runs. An operation opens its own transaction, and what it raises is
`registry.errors.RegistryError`: one line that says what to do.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeAlias, TypeVar

from admin.context.operator_context import OperatorContext, require, visible
from admin.context.policy.permissions import Verb

P = ParamSpec("P")
R = TypeVar("R")
Function: TypeAlias = Callable[Concatenate[OperatorContext, P], R]
Reach: TypeAlias = Literal["installation", "tenant", "own"]
ATTRIBUTE: Final = "operation"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `on`: what the permission is needed for. "installation": for everything;
    "tenant": for the tenant concerned, which the function finds and checks, as it leaves out of
    lists what the user may not see; "own": none, for what belongs to the user."""

    name: str
    run: Callable[..., Any]
    permissions: tuple[Verb, ...]
    on: Reach
    audit: tuple[str, ...]
    """Actions of its entries in the audit log; empty where nothing is changed."""

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """By name, without the context that comes first."""
        _, *found = inspect.signature(self.run).parameters.values()
        return {each.name: each for each in found}

    @property
    def result(self) -> object:
        """The type that it returns."""
        return inspect.signature(self.run).return_annotation


def operation(
    *permissions: Verb, on: Reach = "installation", audit: tuple[str, ...] = ()
) -> Callable[[Function[P, R]], Function[P, R]]:
    """Makes a function an operation. Calling it raises Forbidden without the permission."""

    def decorate(function: Function[P, R]) -> Function[P, R]:
        @functools.wraps(function)
        def checked(context: OperatorContext, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for verb in permissions:
                if on == "tenant":
                    visible(context, verb)
                else:
                    require(context, verb)
            return function(context, *args, **kwargs)

        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        setattr(checked, ATTRIBUTE, Operation(name, checked, permissions, on, audit))
        return checked

    return decorate
