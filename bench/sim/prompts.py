"""Token ids of prompts from their pieces: equal content ids give equal tokens, unequal ones never.

The first tokens of a piece spell its content id, so that a prefix cache tells any two pieces apart;
the rest is filling, which costs neither memory nor time to make.
"""

from bench.sim.parts import FIRST_PROMPT_TOKEN

FILLING = 5
BASE = 32_000
"""Below every vocabulary, less the ids that have a meaning."""


def token_ids(prompt: tuple[tuple[int, int], ...]) -> list[int]:
    """The pieces one after the other. A piece shorter than its name is cut."""
    ids: list[int] = []
    for content, num_tokens in prompt:
        name = _spell(content)
        ids += name[:num_tokens]
        ids += [FILLING] * (num_tokens - len(name))
    return ids


def _spell(content: int) -> list[int]:
    """Digits of `content`, the lowest first, so that short pieces differ as well."""
    digits = []
    while True:
        content, digit = divmod(content, BASE)
        digits.append(FIRST_PROMPT_TOKEN + digit)
        if not content:
            return digits
