"""How much of a step the prompts of a crowd may take while several tenants share the device (pure).

Whoever asks seldom waits for the step under way before anything else. A step that is filled with
prompts lasts several times as long as one that only decodes, so while there is more than one
tenant the prompts of those who have most of the requests are cut into smaller chunks: steps are to
last TARGET_S, or STRETCH times a step that only decodes where that is longer, for each step
reads the weights once and a chunk that hides behind that costs nothing. Prompts of whoever has
little here are not cut.

What a token takes is measured, as time over tokens of the steps that were about as large as is
allowed: a step's fixed part is in it, and the size settles where a step lasts as long as it should.
"""

import math

TARGET_S = 0.025
STRETCH = 1.5
FEWEST_TOKENS = 32
"""A crowd's prompts go on by so many tokens a step, however long that takes."""
NEWEST_SHARE = 0.2
LIKE = 0.5
"""A step tells what a token takes if it had this share, at least, of the tokens allowed."""


class StepPace:
    """What steps of one unit have taken."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._allowed = 0.0

    def observe(self, step_s: float, num_tokens: int, num_prompt_tokens: int) -> None:
        """A step has ended: all its tokens, and those of them that were of prompts.

        A step of no time (a clock that stood, or none that a device can tell) says nothing.
        """
        if not 0.0 < step_s < math.inf:
            return
        if not num_prompt_tokens:
            self._decode_s = _average(self._decode_s, step_s)
        elif self._token_s is None or num_tokens >= LIKE * self._allowed:
            self._token_s = _average(self._token_s, step_s / num_tokens)

    def crowd_tokens(self, num_decodes: int, most: int) -> int:
        """Prompt tokens of crowds in the next step, beside so many rows that decode."""
        if self._token_s is None:
            self._allowed = 0.0
            return most
        step_s = max(TARGET_S, STRETCH * (self._decode_s or 0.0))
        self._allowed = min(step_s / self._token_s, num_decodes + most)
        return max(FEWEST_TOKENS, int(self._allowed) - num_decodes)


def _average(before: float | None, new: float) -> float:
    return new if before is None else before + NEWEST_SHARE * (new - before)
