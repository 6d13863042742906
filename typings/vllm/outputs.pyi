class WeightVersionSpan:
    version: str
    start: int
    end: int

class FlatLogprobs:
    logprobs: list[float]
    token_ids: list[int]
    start_indices: list[int]
    end_indices: list[int]

class CompletionOutput:
    token_ids: list[int]
    logprobs: FlatLogprobs | None
    finish_reason: str | None
    weight_versions: list[WeightVersionSpan] | None

class RequestStateStats:
    arrival_time: float
    first_token_latency: float

class RequestOutput:
    metrics: RequestStateStats | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None
    prompt_logprobs: FlatLogprobs | None
