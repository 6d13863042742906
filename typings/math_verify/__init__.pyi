class LatexExtractionConfig:
    def __init__(
        self, *, boxed_match_priority: int = ..., normalization_config: object = ...
    ) -> None: ...

def parse(
    pred: str,
    extraction_config: list[LatexExtractionConfig],
    *,
    extraction_mode: str = ...,
    parsing_timeout: int | None = ...,
) -> list[object]: ...
def verify(
    gold: list[object],
    target: list[object],
    *,
    allow_set_relation_comp: bool = ...,
    timeout_seconds: int | None = ...,
) -> bool: ...
