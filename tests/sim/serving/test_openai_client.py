"""The `openai` package before a served engine: nothing of it was made for us."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.sim.serving.client import MODEL, Client

openai: Any = pytest.importorskip("openai", reason="pip install openai")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("concurrency", [1, 32, 256])
def test_streams_and_whole_answers_are_parsed(concurrency: int) -> None:
    client = Client("engine.model=Qwen/Qwen3-8B", speed=5, api_key="k")

    async def one(api: Any, index: int) -> int:
        body: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "max_tokens": 6}
        body |= {"extra_body": {"ignore_eos": True}}
        text = [{"role": "user", "content": f"question {index} " * 20}]
        if index % 2:
            whole = await api.chat.completions.create(messages=text, **body)
            assert whole.choices[0].finish_reason == "length"
            return int(whole.usage.completion_tokens)
        stream = await api.chat.completions.create(
            messages=text, stream=True, stream_options={"include_usage": True}, **body
        )
        said, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert said == "000 001 002 003 004 005 "
        return int(usage.completion_tokens)

    async def all_of() -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{client.served.url}/v1", api_key="k", max_retries=0, timeout=120
        ) as api:
            models = await api.models.list()
            assert [each.id for each in models.data] == ["Qwen/Qwen3-8B"]
            num = max(8, concurrency)
            gate = asyncio.Semaphore(concurrency)

            async def gated(index: int) -> int:
                async with gate:
                    return await one(api, index)

            return await asyncio.gather(*map(gated, range(num)))

    try:
        assert set(asyncio.run(all_of())) == {6}
    finally:
        client.end()
    client.engine.run.check()
    assert client.engine.run.recorder.num_finished == max(8, concurrency)


def test_errors_and_cancellation_are_understood() -> None:
    client = Client(api_key="k")
    url = f"{client.served.url}/v1"
    more: dict[str, Any] = {"base_url": url, "max_retries": 0, "timeout": 60}
    api = openai.OpenAI(api_key="k", **more)
    stranger = openai.OpenAI(api_key="wrong", **more)
    try:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            api.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            api.completions.create(model=MODEL, prompt="a", max_tokens=10**6)
        found = api.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1)
        assert len(found.choices) == 4
        body = {"ignore_eos": True}
        with api.completions.create(
            model=MODEL, prompt="a", max_tokens=20_000, stream=True, extra_body=body
        ) as stream:
            assert next(iter(stream)).choices[0].text
        api.completions.create(model=MODEL, prompt="a", max_tokens=9, extra_body=body)
    finally:
        for each in (api, stranger):
            each.close()
        client.end()
    client.engine.run.check()
    assert client.engine.run.recorder.num_left == 1
