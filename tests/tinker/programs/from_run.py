"""Go on with the adapter of a run: its log-probs are those expected, and it is trained further."""

import json
import sys

import tinker
from tinker import types

PATH, IDS, EXPECTED = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
service = tinker.ServiceClient()
trained = service.create_training_client_from_state(PATH)
prompt = types.ModelInput.from_ints(IDS)
sampler = trained.save_weights_and_get_sampling_client("taken")
found = sampler.compute_logprobs(prompt).result()
worst = max(abs(one - other) for one, other in zip(found[1:], EXPECTED, strict=True))
assert worst < 1e-4, worst
datum = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},
)
losses = []
for _ in range(3):
    computed = trained.forward_backward([datum], "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(computed.result().metrics["loss:sum"])
assert losses[-1] < losses[0], losses
print("all well", worst)
