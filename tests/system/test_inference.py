"""Inference jobs in the whole stack: what is served, how it is asked, and what goes wrong."""

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.parts import ask_parts
from tinkermq.clients import AsyncInferenceSchedulerClient
from tinkermq.clients.address import parse_server_url
from tinkermq.schemas.errors import ConfigError
from tinkermq.schemas.infer import ChatRequest, Decoding, InferPart
from tinkermq.schemas.subjects import JobScope

from tests.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hello"}]


async def ask(stack: Stack, scope: JobScope, name: str, **fields: Any) -> list[InferPart]:
    """Chat with a job; return all parts of the answer."""
    request = ChatRequest(request=name, messages=HELLO, **fields)
    parts = ask_parts(
        stack.broker, scope.infer("chat"), request, InferPart, waiting_for="the server"
    )
    async with aclosing(parts):
        return [part async for part in parts]


async def test_a_model_folder_is_served_by_several_servers(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=90) as client:
        job = await client.submit_inference_job(
            str(model), num_gpus=2, max_model_len=256, config={"output_dir": str(tmp_path)}
        )
        assert job["status"] == "RUNNING"
        scope = parse_server_url(job["vllm_server_url"]).scope
        decoding = Decoding(max_tokens=12, seed=5)
        (whole,) = await ask(stack, scope, "whole", decoding=decoding)
        assert whole.model == job["name"]
        assert whole.completion_tokens == len(whole.deltas[0].token_ids)
        streamed = await ask(stack, scope, "bits", decoding=decoding, stream=True)
        tokens = [one for part in streamed for delta in part.deltas for one in delta.token_ids]
        assert tokens == whole.deltas[0].token_ids
        text = "".join(delta.text for part in streamed for delta in part.deltas)
        assert text == whole.deltas[0].text
        with pytest.raises(ConfigError, match="context of this model holds 256"):
            await ask(stack, scope, "long", decoding=Decoding(max_tokens=400))
        ended = await client.complete_job(job["job_id"])
        assert ended["job_id"] == job["job_id"]
