"""One request to vLLM: how it is asked, and what comes back."""

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

import asyncio
import json
from collections.abc import Mapping

import numpy as np
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from .....schemas.wire.errors import EngineError
from ..engine import FinishReason, Generation, Sampling

_FINISH: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
}


class VllmRequest:
    """A request on its way."""

    def __init__(self, adapter: str, key: str, place: "asyncio.Future[None]") -> None:
        self.adapter = adapter
        self.key = key
        """vLLM's name of it."""
        self.place = place
        """Done when it is let in."""
        self.cancelled = False
        self.again = False
        """It was taken back before its first token, to be computed by newer weights alone."""


def parameters_of(sampling: Sampling, seed: int | None, kind: RequestOutputKind) -> SamplingParams:
    """Say how a request is sampled."""
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # of the token that was drawn
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,  # only the tokens above end a request
        output_kind=kind,
    )


def generation_of(request: VllmRequest, parts: list[RequestOutput]) -> Generation:
    """Put the outputs of a request together; the last one has the versions of all tokens.

    Raises EngineError for a request that vLLM gave up.
    """
    completions = [part.outputs[0] for part in parts]
    finish = _FINISH.get(completions[-1].finish_reason)
    if finish is None:
        raise EngineError(
            f"vLLM gave up request {request.key}: {completions[-1].finish_reason}",
            hint="see the generator's log; it may work when asked again",
        )
    tokens = [token for each in completions for token in each.token_ids]
    logprobs = [value for each in completions if each.logprobs for value in each.logprobs.logprobs]
    versions: list[int] = []
    for span in completions[-1].weight_versions or []:
        label: dict[str, int] = json.loads(span.version)
        versions += [label[request.adapter]] * (span.end - span.start)
    assert len(tokens) == len(logprobs) == len(versions)
    return Generation(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        finish,
    )
