"""Log-probabilities as clients are told them: OpenAI's two formats. Part of stage 9.

Comes in: `ScoredToken`s of one choice. Goes out: the `logprobs` object of a chat's choice or of a
completion's. A token whose bytes are half a character is spelled as OpenAI spells it in completions
("bytes:\\\\xe2\\\\x82"), where tokens are keys; in chats it has its `bytes` beside it. JSON has no
infinity: what the model rules out is told as LOWEST.
"""

from collections.abc import Sequence
from typing import Any

from gateway.answer.detokenize import PieceTable, ScoredToken

LOWEST = -9999.0


class ScoreWriter:
    """For one tokenizer."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces

    def chat(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat."""
        content = []
        for token in scored:
            if token.scores is None:
                continue
            top = [self._chat_entry(i, value) for i, value in token.scores.top]
            entry = self._chat_entry(token.token_id, token.scores.logprob)
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, scored: Sequence[ScoredToken], shift: int = 0) -> dict[str, Any]:
        """`choices[].logprobs` of a completion. `shift`: characters before the tokens' text."""
        tops: list[dict[str, float] | None] = []
        for token in scored:
            if token.scores is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for token_id, value in (*token.scores.top, (token.token_id, token.scores.logprob)):
                top.setdefault(self._key(token_id), _finite(value))
            tops.append(top)
        return {
            "tokens": [self._key(token.token_id) for token in scored],
            "token_logprobs": [
                None if token.scores is None else _finite(token.scores.logprob) for token in scored
            ],
            "top_logprobs": tops,
            "text_offset": [shift + token.start for token in scored],
        }

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces.piece(token_id)
        return {
            "token": piece.decode("utf-8", "replace") if piece else self._name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(piece) if piece else None,
        }

    def _key(self, token_id: int) -> str:
        piece = self._pieces.piece(token_id)
        if not piece:
            return self._name(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _name(self, token_id: int) -> str:
        """Of a control token, which has no text."""
        return self._pieces.tokenizer.id_to_token(token_id) or ""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
