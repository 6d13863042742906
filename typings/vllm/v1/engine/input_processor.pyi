from collections.abc import Mapping

from vllm.multimodal.inputs import MultiModalKwargsItems

class InputProcessor:
    def inject_into_mm_cache(
        self, mm_hashes: Mapping[str, list[str]], mm_kwargs: MultiModalKwargsItems
    ) -> None: ...
