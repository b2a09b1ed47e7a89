"""How long prompts and answers may be, by the server's settings and by limits. Part of stage 2."""

from dataclasses import dataclass

from gateway.api.bodies import invalid
from gateway.types import HostedModel, Principal
from registry.accounts.quotas import Limits


@dataclass(frozen=True, slots=True)
class PrepareBounds:
    """A request has `max_choices` at most, and by default `default_max_tokens` each; one with
    several prompts has `max_prompts` answers at most. `reasoning_fields`: what an answer calls its
    reasoning."""

    default_max_tokens: int
    max_choices: int = 1
    reasoning_fields: tuple[str, ...] = ("reasoning", "reasoning_content")
    max_prompts: int = 128


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
                f"{param} has {num_tokens} tokens, more than your limit of {self.prompt} per "
                "request: shorten it",
            )

    def check_output(self, param: str, num_tokens: int) -> None:
        """Raises ApiError where more is asked for."""
        if self.output and num_tokens > self.output:
            raise invalid(
                param,
                f"{param} is {num_tokens}, more than your limit of {self.output} output tokens "
                "per request: lower it",
            )


def lengths_of(principal: Principal, model: HostedModel, gateway: Limits) -> Lengths:
    """The shortest of the key's, the tenant's, the model's and the gateway's."""
    every = (principal.limits, principal.tenant_limits, model.limits, gateway)
    return Lengths(
        min((one.max_prompt_tokens for one in every if one.max_prompt_tokens), default=0),
        min((one.max_output_tokens for one in every if one.max_output_tokens), default=0),
    )
