"""What stage 2 asks of models' templates and tokenizers, and what the gateway knows of each.

All of their work is done by prepare processes (prepare_pool.py); here is what comes of it: what a
gateway keeps of each model revision, least recently used first out, read once however many requests
ask at the same time; and a clear error for the request whose job was ended by its limits.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from gateway.api.output_plan import OutputFormats, detect
from gateway.errors import MODEL_FAILED, SERVER_ERROR, ApiError
from gateway.text.detokenize import TextStream
from gateway.text.offences import EVERYBODY, Offences
from gateway.text.pieces import PieceTable
from gateway.text.prepare_messages import (
    EncoderFacts,
    Failed,
    Ids,
    Inputs,
    Job,
    LoadEncoder,
    LoadText,
    Reply,
    TextFacts,
)
from gateway.text.prepare_pool import PreparePool, PrepareSpent
from gateway.text.templates import TemplateRefused
from gateway.types import HostedModel

log = logging.getLogger(__name__)

_READ_AHEAD = 2
"""Tokenizers at the start: one of 150,000 tokens takes half a second, and 55 MB for good."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is known of a generating model's files. `wants_text`: messages' calls have their
    arguments as text; `tells_date`: its prompts may say what day it is; `variables`: the names that
    its chat template looks up."""

    stop_token_ids: list[int]
    pieces: PieceTable
    formats: OutputFormats
    wants_text: bool
    tells_date: bool
    variables: frozenset[str] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, without control tokens."""
        text = TextStream(self.pieces, (), [])
        return text.push(list(token_ids)) + text.finish()


class Codecs:
    """Of generating models and of encoders, `max_codecs` together. `on_offence` is told the name of
    a model whose files took more than a request may."""

    def __init__(
        self,
        pool: PreparePool,
        max_codecs: int,
        clock: Callable[[], float] = time.monotonic,
        on_offence: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._pool = pool
        self._offences = Offences(clock)
        self._on_offence = on_offence
        self._known: LRUCache[str, TextModel | EncoderFacts] = LRUCache(max_codecs)
        self._loading: dict[str, asyncio.Task[TextModel | EncoderFacts]] = {}

    async def text(self, model: HostedModel) -> TextModel:
        """Of a generating model. Raises ApiError MODEL_FAILED."""
        known = self._known.get(model.revision) or await self._get(model)
        assert isinstance(known, TextModel)
        return known

    async def encoder(self, model: HostedModel) -> EncoderFacts:
        """Of a model that embeds or classifies. Raises ApiError MODEL_FAILED."""
        known = self._known.get(model.revision) or await self._get(model)
        assert isinstance(known, EncoderFacts)
        return known

    async def ask(self, model: HostedModel, job: Job, tenant_id: str = EVERYBODY) -> Reply:
        """A job about the model's files, for a tenant's request. Never Failed.

        Raises TemplateRefused, ValueError for what the tokenizer cannot encode, ApiError.
        """
        revision = model.revision
        wait_s, reason = self._offences.pause(revision, tenant_id)
        if wait_s:
            raise _ended(model, f"an earlier request took {reason}", wait_s)
        is_long = isinstance(job, LoadText | LoadEncoder) or self._offences.is_known(revision)
        try:
            reply = await self._pool.ask(job, is_long, tenant_id)
        except PrepareSpent as error:
            wait_s = self._offences.add(revision, tenant_id, str(error))
            log.error(
                "a request of tenant %s to model %s was ended by the limits of its chat template "
                "and tokenizer (%s): not asked again for %.0f s; if this repeats for other "
                "tenants, withdraw the model",
                tenant_id or "(all)",
                model.name,
                error,
                wait_s,
            )
            self._on_offence(model.name)
            raise _ended(model, f"they took {error}", wait_s) from error
        if isinstance(reply, Failed):
            raise _failure(model, reply)
        if isinstance(reply, Inputs):
            _check_rows(model, reply)
        return reply

    async def read_ahead(self, models: Iterable[HostedModel]) -> None:
        """Load those of a small catalog, or of pinned models, before anybody asks for them."""
        found, most = list(models), min(_READ_AHEAD, int(self._known.maxsize))
        if len(found) > most:
            found = [model for model in found if model.pinned][:most]
        for model in found:
            try:
                await self._get(model)
            except ApiError as error:  # Whoever asks for the model hears of it.
                log.warning("tokenizer of model %s is not read ahead: %s", model.name, error)
            except Exception:
                log.exception("tokenizer of model %s cannot be read ahead", model.name)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    async def _get(self, model: HostedModel) -> TextModel | EncoderFacts:
        loading = self._loading.get(model.revision)
        if loading is None:
            loading = asyncio.create_task(self._load(model))
            self._loading[model.revision] = loading
        # Shielded: one caller that goes away must not take it from the others.
        return await asyncio.shield(loading)

    async def _load(self, model: HostedModel) -> TextModel | EncoderFacts:
        is_text = model.task == "generate"
        try:
            job = LoadText(model.pack_dir) if is_text else LoadEncoder(model.pack_dir)
            facts = await self.ask(model, job)
            assert isinstance(facts, TextFacts | EncoderFacts)
            known: TextModel | EncoderFacts
            if isinstance(facts, TextFacts):
                known = await asyncio.to_thread(_text_model, facts, model)
            else:
                known = facts
        except (ValueError, TemplateRefused) as error:
            raise _failure(model, Failed("files", str(error))) from error
        finally:
            del self._loading[model.revision]
        self._known[model.revision] = known
        return known


def prompt_ids(reply: Ids) -> list[int]:
    """Token ids as the pipeline has them."""
    return array("i", reply.ids).tolist()


def _text_model(facts: TextFacts, model: HostedModel) -> TextModel:
    """Raises ValueError."""
    return TextModel(
        # What is no token can never be sampled, and may be no number that fits into a message.
        stop_token_ids=[i for i in facts.stop_token_ids if i < model.vocab_size],
        pieces=PieceTable(facts.pieces),
        formats=detect(facts.template, facts.special_ids),
        wants_text=facts.wants_text,
        tells_date="strftime_now" in facts.template,
        variables=frozenset(facts.variables),
    )


def _check_rows(model: HostedModel, reply: Inputs) -> None:
    """A tokenizer may have more tokens than the model has rows. Raises ValueError."""
    last = max((max(item.ids, default=0) for item in reply.inputs), default=0)
    if last >= model.vocab_size:
        raise ValueError(
            f"the text has the token {last}, for which the model has no row: its last is "
            f"{model.vocab_size - 1}"
        )


def _ended(model: HostedModel, how: str, wait_s: float) -> ApiError:
    return ApiError(
        MODEL_FAILED,
        f"the chat template and tokenizer of model {model.name!r} were ended: {how}; shorten or "
        "change the request, or tell the operator of this server",
        retry_after_s=wait_s,
    )


def _failure(model: HostedModel, failed: Failed) -> Exception:
    if failed.kind == "template":
        return TemplateRefused(failed.message)
    if failed.kind == "text":
        return ValueError(failed.message)
    if failed.kind == "files":
        log.error("tokenizer of model %s cannot be loaded: %s", model.name, failed.message)
        text = f"the tokenizer of model {model.name!r} cannot be loaded"
        return ApiError(MODEL_FAILED, text)
    log.error("a request to model %s could not be prepared: %s", model.name, failed.message)
    return ApiError(SERVER_ERROR, "the request could not be prepared: retry the request")
