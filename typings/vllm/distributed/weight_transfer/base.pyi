from typing import Any, Generic, TypeVar

import torch

TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)

class WeightTransferInitInfo: ...
class WeightTransferUpdateInfo: ...

class WeightTransferInitRequest:
    def __init__(self, init_info: dict[str, Any]) -> None: ...

class WeightTransferUpdateRequest:
    def __init__(self, update_info: dict[str, Any]) -> None: ...

class ParallelConfig:
    rank: int

class WeightTransferEngine(Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]
    parallel_config: ParallelConfig
    model_config: Any
    device: torch.device
    model: Any
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None: ...
    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
