from typing import Any

class LayerReloadingInfo:
    load_numel_total: int | None
    loaded_weights: list[tuple[str, Any]]
    kernel_tensors: tuple[dict[str, Any], dict[str, Any]] | None
    def can_load(self) -> bool: ...
    def reset(self) -> None: ...

def get_layerwise_info(layer: Any) -> LayerReloadingInfo: ...
