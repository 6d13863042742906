"""Train for sixty steps as a loop of RL does: each few steps save the weights and sample from them.

What is trained does not depend on what was sampled; the path of the checkpoint is printed.
"""

import random
import sys
import time

import tinker
from tinker import types

BASE, NUM_STEPS, PAUSE_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
SAMPLED_EACH = 6
rng = random.Random(6)
service = tinker.ServiceClient()
trained = service.create_lora_training_client(base_model=BASE, rank=4, seed=7)
trained = trained.result() if hasattr(trained, "result") else trained
prompt = types.ModelInput.from_ints([10, 11, 12])
for step in range(NUM_STEPS):
    rows = [[rng.randrange(10, 200) for _ in range(24)] for _ in range(4)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * 23},
        )
        for row in rows
    ]
    computed = trained.forward_backward(data, "cross_entropy")
    stepped = trained.optim_step(types.AdamParams(learning_rate=1e-3))
    computed.result()
    stepped.result()
    if step % SAMPLED_EACH == 0:
        sampler = trained.save_weights_and_get_sampling_client()
        wanted = types.SamplingParams(max_tokens=8, stop=[])
        told = sampler.sample(prompt, num_samples=2, sampling_params=wanted).result()
        assert [len(one.tokens) for one in told.sequences] == [8, 8], told
    print("step", step, flush=True)
    time.sleep(PAUSE_S)
print("path", trained.save_state("end").result().path, flush=True)
