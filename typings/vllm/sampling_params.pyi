from enum import Enum
from typing import Any

class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

class SamplingParams:
    extra_args: dict[str, Any] | None
    def __init__(
        self,
        *,
        max_tokens: int | None = 16,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: list[int] | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        flat_logprobs: bool = False,
        detokenize: bool = True,
        ignore_eos: bool = False,
        output_kind: RequestOutputKind = ...,
        stream_interval: int | None = None,
        extra_args: dict[str, Any] | None = None,
    ) -> None: ...
