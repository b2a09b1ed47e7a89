"""langchain-openai and langchain-anthropic by langchain-tests, its standard suite for a provider.

What a provider may leave out stays out: pictures, sound, files.
"""

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

from tests.compat.loops.kit import ANOTHER, EMBED, KEY, MODEL, TEXT, URL, script

BASE = f"{URL}/v1"


class _Chat(ChatModelIntegrationTests):
    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return ANOTHER


class TestChats(_Chat):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": BASE, "api_key": KEY, "stream_usage": True}


class TestResponses(TestChats):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestMessages(_Chat):
    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": 500}


class TestEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # Its default counts tokens by OpenAI's own tokenizer.
        own = {"check_embedding_ctx_length": False}
        return {"model": EMBED, "base_url": BASE, "api_key": KEY, **own}


def test_text_completions_of_several_prompts() -> None:
    model: Any = OpenAI(model=MODEL, base_url=BASE, api_key=KEY, temperature=0)
    texts = model.batch([script({"text": f"{TEXT} {number}"}) for number in range(3)])
    assert texts == [f"{TEXT} {number}" for number in range(3)]


def test_a_prompt_that_is_too_long_is_known_by_its_message() -> None:
    model: Any = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY)
    with pytest.raises(Exception, match="context_length_exceeded") as caught:
        model.invoke("word " * 20_000)
    assert "ContextOverflow" in type(caught.value).__name__
