"""Prompts of a wanted number of tokens, and counting tokens in text, by a model's own tokenizer.

Lives here: what needs `tokenizer.json`. Does not: sending anything. Prompts are random words of the
vocabulary, different for every request, so that no prefix cache of any server helps.
"""

import random
from pathlib import Path

from tokenizers import Tokenizer

_MAX_TRIES = 4


class PromptMaker:
    """Draws prompts from a model folder's tokenizer. The same (seed, index) gives the same text."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._special = {
            index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._num_ids = self._tokenizer.get_vocab_size()

    def prompt(self, num_tokens: int, seed: str, index: int) -> str:
        """Text of `num_tokens` tokens, or as near as the tokenizer's merges allow in a few tries.

        The server's usage says what it really was; results report that.
        """
        rng = random.Random(f"{seed}/{index}")
        text = ""
        for _ in range(_MAX_TRIES):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) > num_tokens:
                text = self._tokenizer.decode(ids[:num_tokens])
                continue
            if len(ids) == num_tokens:
                break
            fresh = [self._draw(rng) for _ in range(num_tokens - len(ids))]
            text = self._tokenizer.decode(ids + fresh)
        return text

    def count(self, text: str) -> int:
        """Tokens of `text`, read back. Nearly what was generated, not by contract the same."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _draw(self, rng: random.Random) -> int:
        while True:
            index = rng.randrange(self._num_ids)
            # Single characters and special tokens would merge with neighbours or vanish.
            token = self._tokenizer.id_to_token(index)
            if token is not None and len(token) > 2 and index not in self._special:
                decoded = self._tokenizer.decode([index])
                if decoded.strip() and decoded.isprintable() and "\ufffd" not in decoded:
                    return index
