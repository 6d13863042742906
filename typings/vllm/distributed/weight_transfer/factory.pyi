from typing import Any

class WeightTransferEngineFactory:
    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: str | type[Any], class_name: str | None = None
    ) -> None: ...
