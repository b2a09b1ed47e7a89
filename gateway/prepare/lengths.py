"""How long a prompt and an answer may be by the operator's limits, beside what the model takes."""

from dataclasses import dataclass

from gateway.prepare.wire import invalid
from gateway.types import HostedModel, Principal
from registry.quotas import Limits


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens at most of one request's prompt and of each of its answers; 0: no bound."""

    prompt: int = 0
    output: int = 0

    def check_prompt(self, param: str, num_tokens: int) -> None:
        """Raises ApiError where a prompt is longer."""
        if self.prompt and num_tokens > self.prompt:
            raise invalid(
                param,
                f"{param} has {num_tokens} tokens, but your limit is {self.prompt} a request: "
                "send less",
            )

    def check_output(self, param: str, num_tokens: int) -> None:
        """Raises ApiError where more is asked for."""
        if self.output and num_tokens > self.output:
            raise invalid(
                param, f"{param} is {num_tokens}, but your limit is {self.output} tokens an answer"
            )


def lengths_of(principal: Principal, model: HostedModel, gateway: Limits) -> Lengths:
    """The shortest of the key's, the tenant's, the model's and the gateway's."""
    every = (principal.limits, principal.tenant_limits, model.limits, gateway)
    return Lengths(
        min((one.max_prompt_tokens for one in every if one.max_prompt_tokens), default=0),
        min((one.max_output_tokens for one in every if one.max_output_tokens), default=0),
    )
