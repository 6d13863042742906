from typing import Any

class UnquantizedFusedMoEMethod:
    moe: Any
    moe_kernel: Any
