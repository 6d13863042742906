"""What a program written for Tinker does, for either service; run by an SDK's own interpreter.

Prints a line with the time behind each step, the step's loss, and at the end whether it went well.
"""

# pyright: reportMissingImports=false

import json
import random
import sys
import time
from typing import Any

import tinker
from tinker import types

BASE, STEPS, SEQUENCES, TOKENS, RANK = sys.argv[1], *map(int, sys.argv[2:6])
rng = random.Random(0)
DATA: list[list[list[int]]] = [
    [[rng.randrange(10, 200) for _ in range(TOKENS + 1)] for _ in range(SEQUENCES)]
    for _ in range(4)
]
client: Any = tinker.ServiceClient()
trained: Any = client.create_lora_training_client(base_model=BASE, rank=RANK)


def datum(ids: list[int]) -> Any:
    """Return a sequence whose tokens are all trained."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


for step in range(STEPS):
    computed = trained.forward_backward([datum(ids) for ids in DATA[step % 4]], "cross_entropy")
    stepped = trained.optim_step(types.AdamParams(learning_rate=1e-3))
    result = computed.result()
    stepped.result()
    losses = [float(-one["logprobs"].to_numpy().sum()) for one in result.loss_fn_outputs]
    print(json.dumps({"step": step, "time": time.time(), "loss": sum(losses)}), flush=True)
