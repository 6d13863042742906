from typing import Any

class ParallelLMHead:
    quant_method: Any
