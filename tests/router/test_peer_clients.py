"""LangChain's and LiteLLM's clients work unchanged, where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from router.fleet import running_fleet

from kvbaton.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]


async def test_langchain(tiny_model_dir: Path) -> None:
    openai = pytest.importorskip("langchain_openai")
    async with running_fleet(Tokenizer.load(tiny_model_dir), {"p0": "prefill", "d0": "decode"}) as fleet:
        chat = openai.ChatOpenAI(model="tiny", base_url=f"{fleet.url}/v1", api_key="any", max_retries=0, seed=1)
        answer = await chat.ainvoke([("system", "be short"), ("human", "hello " * 50)])
        assert answer.content == "hello from d0" and answer.usage_metadata["output_tokens"] > 0
        parts = [part async for part in chat.astream([("human", "hello")])]
        assert "".join(part.content for part in parts) == "hello from d0"
        completion = openai.OpenAI(model="tiny", base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)
        assert await completion.ainvoke("hello") == "hello from d0"


async def test_litellm(tiny_model_dir: Path) -> None:
    litellm = pytest.importorskip("litellm")
    async with running_fleet(Tokenizer.load(tiny_model_dir), {"p0": "prefill", "d0": "decode"}) as fleet:
        asked = {"model": "openai/tiny", "api_base": f"{fleet.url}/v1", "api_key": "any"}
        messages = [{"role": "user", "content": "hello"}]
        answer = await litellm.acompletion(messages=messages, **asked)
        assert answer.choices[0].message.content == "hello from d0"
        stream = await litellm.acompletion(messages=messages, stream=True, **asked)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello from d0"
