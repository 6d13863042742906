from typing import Any

class UnquantizedFusedMoEMethod:
    moe_kernel: Any
