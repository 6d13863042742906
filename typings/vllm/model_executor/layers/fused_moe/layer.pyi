from typing import Any

import torch

class MoERunner(torch.nn.Module):
    layer_id: int
    router: Any
