"""One request to vLLM: its parameters, its prompt with images, and its results.

vLLM's own processor for images and their tokens is not used. vLLM gets the output of the learner's
reader at the places of the image tokens in the prompt, so that pixels are equal to the bit and
prompts do not change. vLLM identifies an image by the digest of its file. It keeps recent images,
so that a group's image is sent once, and it never shares a prompt's cache between different images.

Shape letters: see `actors/policy/vision.py`.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.inputs import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.input_processor import InputProcessor

from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import EngineError
from ...policy.vision import Images
from ..engine import FinishReason, Generation, PromptScores, Sampling, num_equal
from .constraints import constraint_arguments

_FINISH: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "cancelled",
}


class VllmRequest:
    """A request in vLLM."""

    def __init__(self, adapter: str, key: str, place: "asyncio.Future[None]", version: int) -> None:
        self.adapter = adapter
        self.version = version
        """Version of its weights when it arrived."""
        self.key = key
        """Its name in vLLM."""
        self.place = place
        """Done when it is admitted."""
        self._starts = [(0, version)]
        """Versions that draw its tokens, each with its first token's number."""
        self._num_streamed = 0
        self.conversation: str | None = None
        """The conversation that it is a turn of."""
        self.num_top = 0
        """Number of likeliest tokens to report at each position."""
        self.cancelled = False
        self.again = False
        """Whether it was withdrawn before its first token, to be computed with newer weights."""

    def begin(self, version: int) -> None:
        """Record that a version computes it from its first token on."""
        self._starts, self._num_streamed = [(0, version)], 0

    def note_swap(self, num_drawn: int, version: int) -> None:
        """Record that a version draws the tokens after the first `num_drawn` ones."""
        self._starts.append((num_drawn, version))

    def next_version(self) -> int:
        """Return the version that drew the next streamed token. It may be an old one: vLLM
        holds tokens back until it has `stream_every`."""
        while len(self._starts) > 1 and self._starts[1][0] <= self._num_streamed:
            del self._starts[0]
        self._num_streamed += 1
        return self._starts[0][1]


class Turns:
    """Finds out which conversations vLLM has evicted between two turns."""

    def __init__(self, block_tokens: int) -> None:
        """vLLM's cache has blocks of so many tokens."""
        self._slack = 2 * block_tokens
        self._last: dict[str, tuple[str, IntVector]] = {}

    def note(self, conversation: str, salt: str, tokens: IntVector, reused: int) -> bool:
        """Note a turn's prompt and answer, of which the cache had `reused` tokens.

        Returns whether it had more of them after the last turn, with the same salt.
        """
        before, known = self._last.get(conversation, (salt, tokens[:0]))
        self._last[conversation] = salt, tokens
        return before == salt and reused + self._slack < num_equal(known, tokens)

    def forget(self, conversation: str) -> None:
        """Forget a conversation that has ended."""
        self._last.pop(conversation, None)


def parameters_of(
    sampling: Sampling, seed: int | None, kind: RequestOutputKind, key: str
) -> SamplingParams:
    """Return vLLM's parameters of a request; `key` is its name in vLLM."""
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=seed,
        logprobs=sampling.num_top,  # plus the drawn token
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,  # only the tokens above end a request
        output_kind=kind,
        stream_interval=sampling.stream_every,
        extra_args=constraint_arguments(sampling, key),
    )


def scoring_parameters(top_k: int) -> SamplingParams:
    """Return vLLM's parameters to score a prompt; vLLM must draw a token after it."""
    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scores_of(output: RequestOutput, num: int, top_k: int) -> PromptScores:
    """Return the scores in an output of its prompt of `num` tokens.

    vLLM lists the prompt's token at each position, then the likeliest tokens.
    """
    prompt_logprobs = output.prompt_logprobs
    scores = PromptScores.unknown(num, top_k)
    if prompt_logprobs is None or num == 1:
        return scores
    width = top_k + 1
    values = np.array(prompt_logprobs.logprobs, np.float32).reshape(num - 1, -1)[:, :width]
    scores.logprobs[1:] = values[:, 0]
    scores.top_logprobs[1:] = values[:, 1:]
    scores.top_ids[1:] = np.array(prompt_logprobs.token_ids, np.int32).reshape(num - 1, -1)[
        :, 1:width
    ]
    return scores


def generation_of(request: VllmRequest, parts: list[RequestOutput]) -> Generation:
    """Join the outputs of a request; the last output has the versions of all tokens.

    Raises EngineError for a request that vLLM aborted.
    """
    completions = [part.outputs[0] for part in parts]
    finish = _FINISH.get(completions[-1].finish_reason)
    if finish is None:
        raise EngineError(
            f"vLLM gave up request {request.key}: {completions[-1].finish_reason}",
            hint="see the generator's log; it may work when asked again",
        )
    drawn = list(drawn_of(completions, request.num_top))
    tokens, logprobs = [row[0] for row in drawn], [row[1] for row in drawn]
    versions: list[int] = []
    for span in completions[-1].weight_versions or []:
        label: dict[str, int] = json.loads(span.version)
        # An adapter added without a pause is in no label before the next swap.
        version = label.get(request.adapter, request.version)
        versions += [version] * (span.end - span.start)
    assert len(tokens) == len(logprobs) == len(versions)
    return Generation(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        finish,
        top_ids=_top([[token for token, _ in top] for _, _, top in drawn], request, np.int32),
        top_logprobs=_top(
            [[value for _, value in top] for _, _, top in drawn], request, np.float32
        ),
        first_token=_first_token(parts[-1]),
    )


def _first_token(output: RequestOutput) -> float:
    """Return the time of vLLM's first token, which vLLM counts from the request's arrival."""
    metrics = output.metrics
    known = metrics is not None and metrics.first_token_latency
    return metrics.arrival_time + metrics.first_token_latency if metrics and known else 0.0


def _top(rows: list[list[Any]], request: VllmRequest, kind: Any) -> Any:
    """Return [N, K] of the likeliest tokens; None if they were not requested."""
    if not request.num_top:
        return None
    return np.array(rows, kind).reshape(len(rows), -1)


def drawn_of(
    completions: Sequence[CompletionOutput], num_top: int
) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Yield each token and log-prob, with the likeliest tokens and their log-probs in order."""
    for each in completions:
        token_logprobs = each.logprobs
        if token_logprobs is None:
            continue
        spans = zip(token_logprobs.start_indices, token_logprobs.end_indices, strict=True)
        for token, (start, end) in zip(each.token_ids, spans, strict=True):
            ids, values = token_logprobs.token_ids, token_logprobs.logprobs
            ranked = range(start + 1, end)
            if num_top and end - start <= num_top:
                # If vLLM has joined the outputs of several steps, the drawn token comes first, and
                # is not repeated among the likeliest.
                ranked = sorted(range(start, end), key=lambda at: -values[at])
            top = tuple((ids[at], values[at]) for at in ranked[:num_top])
            yield token, values[start], top


# -- prompts with images ---------------------------------------------------------------------------

_KIND = "image"


@dataclass(frozen=True, slots=True, eq=False)
class ShownImages:
    """Read images with the places of their tokens in a prompt."""

    images: Images
    starts_I: NDArray[np.int64]
    """Position of each image's first token."""
    names: Sequence[str]
    """Digests of the files."""


def show(images: Images, places_Q: NDArray[np.int64], encoded: Sequence[bytes]) -> ShownImages:
    """Return read images at the places of their tokens in a prompt."""
    lengths_I = np.array(images.tokens)
    names = [hashlib.sha256(file).hexdigest() for file in encoded]
    return ShownImages(images, places_Q[np.cumsum(lengths_I) - lengths_I], names)


def prompt_with_images(
    processor: InputProcessor, tokens: list[int], shown: ShownImages, salt: str
) -> MultiModalInput:
    """Return a prompt for the next request, without images that vLLM holds."""
    images = shown.images
    patches_I = images.grid_I3.prod(-1)
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": images.pixels_PD, "image_grid_thw": images.grid_I3},
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, patches_I),
            "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
        },
    )
    names = {_KIND: list(shown.names)}
    processor.inject_into_mm_cache(names, items)
    places = [
        PlaceholderRange(offset=int(start), length=length)
        for start, length in zip(shown.starts_I, images.tokens, strict=True)
    ]
    return mm_input(tokens, items, names, {_KIND: places}, cache_salt=salt)
