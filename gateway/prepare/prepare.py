"""Stage 2: a well-formed request becomes token ids with every bound and default filled in.

Comes in: a `WireRequest` and who sent it. Goes out: a `Prepared` (the request in token ids, and the
codec that will turn its answer into text), or an ApiError; nothing has been reserved yet.

Templates and tokenizers run in the threads of codecs.py. What encoders are asked is prepared by
encode_prepare.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.protocol import SamplingParams
from gateway.answer.output_parser import IdentityParser, OutputParser
from gateway.auth import find_model
from gateway.cache.asks import NO_WISH, wish_of
from gateway.cache.scope import Turn, question_of, turn_of
from gateway.directory import Directory
from gateway.errors import CONTEXT_LENGTH, ApiError, wrong_task
from gateway.policy import cache_rule
from gateway.policy.cache_rule import OFF, CacheAsk, CachePlan
from gateway.prepare.chat_prompt import Prompt, chat_prompt
from gateway.prepare.codecs import Codecs
from gateway.prepare.lengths import Lengths, lengths_of
from gateway.prepare.templates import TemplateRefused
from gateway.prepare.tokenization import TextCodec
from gateway.prepare.wire import WireRequest, invalid
from gateway.random_ids import RandomBytes
from gateway.types import HostedModel, PreparedRequest, Principal

# Prompts beyond it are measured before they are rendered and encoded; few that fit are so long.
_LONG_CHARS_PER_TOKEN = 6
SEED_MASK = (1 << 63) - 1
# top_p 0 is legal and means the likeliest token alone; samplers want a probability above 0.
_SMALLEST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the later stages work with."""

    request: PreparedRequest
    codec: TextCodec
    cache: CachePlan
    new_parser: Callable[[], OutputParser] = IdentityParser
    """Makes the parser of one choice's text."""
    turn: Turn | None = None
    """Set where the cache is to be looked up."""


@dataclass(frozen=True, slots=True)
class PrepareBounds:
    """A request has `max_choices` at most, and by default `default_max_tokens` each."""

    default_max_tokens: int
    max_choices: int = 1


class Preparer:
    """Stage 2 of what is generated. One object per gateway process."""

    def __init__(
        self,
        directory: Directory,
        codecs: Codecs,
        bounds: PrepareBounds,
        has_embedder: bool = False,
        judges: bool = False,
    ) -> None:
        """`has_embedder`: the cache can compare meanings; `judges`: it keeps no answer of which the
        model was not sure."""
        self._judges = judges
        self._has_embedder = has_embedder
        self._directory = directory
        self._codecs = codecs
        self._bounds = bounds
        self._random = RandomBytes()

    def close(self) -> None:
        """Stop the threads; what they are at is finished first."""
        self._codecs.pool.close()

    async def prepare(
        self,
        asked: WireRequest,
        principal: Principal,
        headers: Mapping[str, str],
        request_id: str,
        now_at: float,
    ) -> Prepared:
        """Raises ApiError: unknown model, a prompt that does not fit or cannot be rendered."""
        model = find_model(principal, self._directory, asked.model)
        lengths = lengths_of(principal, model, self._directory.limits)
        self._check(asked, model, lengths)
        cache = self._cache(asked, principal, headers)
        codec = await self._codecs.text(model)
        prompt = await self._encode(codec, model, asked)
        lengths.check_prompt(_param(asked), len(prompt.ids))
        only_prompt = asked.max_tokens == 0
        request = PreparedRequest(
            request_id=request_id,
            kind=asked.kind,
            model=model,
            prompt_token_ids=prompt.ids,
            max_tokens=self._max_tokens(asked, model, len(prompt.ids), lengths),
            sampling=_sampling(asked, self._random),
            stop_token_ids=[] if asked.ignore_eos else codec.stop_token_ids,
            stop_strings=asked.stop,
            stream=asked.stream,
            include_usage=asked.include_usage,
            cache_mode=cache.mode,
            created_at=int(now_at),
            rates=self._directory.rates(principal.tenant_id, model.name, now_at),
            num_choices=asked.n,
            priority=asked.priority,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.logprobs if asked.echo else -1,
            echo=self._echo(asked, codec, prompt.ids),
            only_prompt=only_prompt,
            continues_text=asked.continue_final_message,
            constraint=prompt.plan.constraint,
            shown_token_ids=frozenset(
                codec.formats.special_ids[token] for token in prompt.plan.spelled_tokens
            ),
            is_judged=self._judges and cache.decision == "lookup" and cache.keeps,
        )
        turn = None
        if cache.decision == "lookup":
            longest = min(self._bounds.default_max_tokens, lengths.output or model.max_context)
            turn = turn_of(asked, longest, codec.tells_date)
        return Prepared(request, codec, cache, prompt.plan.new_parser, turn)

    def _cache(
        self, asked: WireRequest, principal: Principal, headers: Mapping[str, str]
    ) -> CachePlan:
        """Raises ApiError for headers that cannot be obeyed."""
        wish = wish_of(headers, self._has_embedder)
        if wish is NO_WISH and principal.cache.mode == "off":
            return OFF
        return cache_rule.decide(
            CacheAsk(
                policy=principal.cache,
                wish=wish,
                temperature=asked.temperature,
                has_seed=asked.seed is not None,
                is_plain=asked.n == 1 and asked.logprobs < 0 and not asked.echo,
                has_turn=bool(question_of(asked)),
                has_embedder=self._has_embedder,
            )
        )

    def _check(self, asked: WireRequest, model: HostedModel, lengths: Lengths) -> None:
        """What can be said without reading texts. Raises ApiError."""
        if model.task != "generate":
            raise wrong_task(model.name, model.task)
        if asked.n > self._bounds.max_choices:
            raise invalid("n", f"n must not be above {self._bounds.max_choices}")
        lengths.check_output("max_tokens", asked.max_tokens or 0)
        last = model.vocab_size - 1
        if asked.logit_bias and max(asked.logit_bias) > last:
            raise invalid("logit_bias", f"logit_bias names a token id outside 0 to {last}")
        if asked.kind == "chat":
            # However it is rendered, a message is a token at least.
            self._check_length(asked, model, len(asked.messages), "at least ")
        elif not isinstance(asked.prompt, str):
            self._check_length(asked, model, len(asked.prompt))
            if asked.prompt and not 0 <= min(asked.prompt) <= max(asked.prompt) <= last:
                raise invalid("prompt", f"prompt holds a token id outside 0 to {last}")

    async def _encode(self, codec: TextCodec, model: HostedModel, asked: WireRequest) -> Prompt:
        param = _param(asked)
        try:
            prompt = await self._codecs.pool.run_paced(
                lambda: self._prompt(codec, model, asked), self._codecs.pace(model), asked.num_bytes
            )
        except TemplateRefused as error:
            raise invalid(
                param,
                f"the chat template of model {model.name!r} does not take these messages: {error}",
            ) from error
        except ValueError as error:
            raise invalid(param, str(error)) from error
        ids = prompt.ids
        if not ids:
            raise invalid(param, f"{param} must hold at least one token")
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            raise invalid(param, f"{param} holds a token id outside 0 to {model.vocab_size - 1}")
        return prompt

    def _prompt(self, codec: TextCodec, model: HostedModel, asked: WireRequest) -> Prompt:
        """Runs in the pool. Long texts are measured first: rendering and encoding megabytes that
        cannot fit would take seconds."""
        if not isinstance(asked.prompt, str):
            return Prompt(list(asked.prompt))
        texts = [asked.prompt] if asked.kind == "completion" else _shown_texts(asked, codec)
        self._check_texts(codec, model, asked, texts)
        if asked.kind == "completion":
            return Prompt(codec.encode_prompt(asked.prompt))
        return chat_prompt(
            codec, asked, lambda text: self._check_texts(codec, model, asked, [text])
        )

    def _check_texts(
        self, codec: TextCodec, model: HostedModel, asked: WireRequest, texts: Sequence[str]
    ) -> None:
        """Raises ApiError where these are surely too long."""
        if sum(map(len, texts)) > _LONG_CHARS_PER_TOKEN * model.max_context and (
            codec.surely_longer(texts, model.max_context)
        ):
            self._check_length(asked, model, model.max_context + 1, "at least ")

    def _max_tokens(
        self, asked: WireRequest, model: HostedModel, num_prompt: int, lengths: Lengths
    ) -> int:
        room = self._check_length(asked, model, num_prompt)
        bound = min(self._bounds.default_max_tokens, room, lengths.output or room)
        # Where nothing is wanted the worker makes one token all the same, which is dropped.
        wanted = bound if asked.max_tokens is None else max(1, asked.max_tokens)
        if asked.min_tokens > wanted:
            raise invalid("min_tokens", f"min_tokens is above the {wanted} tokens allowed at most")
        return wanted

    def _check_length(
        self, asked: WireRequest, model: HostedModel, num_prompt: int, hedge: str = ""
    ) -> int:
        """How many tokens may be generated. Raises ApiError where none may, or fewer than asked."""
        room = model.max_context - num_prompt
        wanted = asked.max_tokens or asked.min_tokens
        if room >= 1 and wanted <= room:
            return room
        completion = f" and {wanted} for the completion" if wanted else ""
        param = _param(asked)
        raise ApiError(
            CONTEXT_LENGTH,
            f"the context of model {model.name!r} holds {model.max_context} tokens, but "
            f"{hedge}{num_prompt} are in the {param}{completion}: send less, or ask for less",
            param,
        )

    def _echo(self, asked: WireRequest, codec: TextCodec, ids: Sequence[int]) -> str:
        if not asked.echo:
            return ""
        return asked.prompt if isinstance(asked.prompt, str) else codec.decode(ids)


def _param(asked: WireRequest) -> str:
    return "messages" if asked.kind == "chat" else "prompt"


def _shown_texts(asked: WireRequest, codec: TextCodec) -> list[str]:
    """What templates show of messages; of an assistant's some leave out the reasoning."""
    marks = codec.formats.reasoning
    texts = [message["content"] for message in asked.messages]
    return texts if marks is None else [text.rpartition(marks.close)[2] for text in texts]


def _sampling(asked: WireRequest, random: RandomBytes) -> SamplingParams:
    """A seed is always explicit from here on: the caller's, or one drawn here at the edge."""
    seed = int.from_bytes(random.take(8), "big") if asked.seed is None else asked.seed
    return SamplingParams(
        temperature=asked.temperature,
        top_p=max(asked.top_p, _SMALLEST_TOP_P),
        seed=seed & SEED_MASK,
        top_k=asked.top_k,
        min_p=asked.min_p,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=dict(asked.logit_bias),
        min_tokens=asked.min_tokens,
    )
