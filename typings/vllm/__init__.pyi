"""What this project uses of vLLM 0.32, which is not installed for development."""

from typing import Any

from vllm.sampling_params import SamplingParams as SamplingParams

class AsyncEngineArgs:
    def __init__(self, **arguments: Any) -> None: ...

class LLM:
    def __init__(self, **arguments: object) -> None: ...
