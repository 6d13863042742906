class NormalizationConfig:
    def __init__(
        self,
        *,
        basic_latex: bool,
        units: bool,
        malformed_operators: bool,
        nits: bool,
        boxed: str,
        equations: bool,
    ) -> None: ...
