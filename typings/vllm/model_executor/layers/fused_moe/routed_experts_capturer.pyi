from typing import Any

import torch

class RoutedExpertsCapturer:
    device_buffer: torch.Tensor
    shape_per_token: tuple[int, int]
    def __init__(self, max_num_batched_tokens: int, vllm_config: Any) -> None: ...
    def snapshot_routing_data(self, num_tokens: int) -> torch.Tensor: ...

def bind_routed_experts_capturer(
    model: torch.nn.Module, capturer: RoutedExpertsCapturer
) -> None: ...
