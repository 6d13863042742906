"""Make every call of docs/tinker.md with the SDK's own defaults; print `all well` at the end.

Runs in an environment with the SDK; TINKER_BASE_URL and TINKER_API_KEY are all it is told.
"""

import sys

import tinker
import torch
from tinker import types

IDS = list(range(20, 40))
ADAM = types.AdamParams(learning_rate=2e-2)
BASE = sys.argv[1]


def made(future):
    """Newer SDKs return a future of a client, older ones the client."""
    return future.result() if hasattr(future, "result") else future


def datum(shift=0, **inputs):
    tokens = [(one + 40 * shift) % 200 + 10 for one in IDS]
    inputs = inputs or {"weights": [1.0] * 19}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def refused(call, *said):
    told = ""
    try:
        call()
    except (tinker.TinkerError, ValueError) as error:
        told = str(error)
    assert told, f"nothing said {said}"
    assert all(one in told for one in said), told


def loss(result):
    return result.metrics["loss:sum"]


service = tinker.ServiceClient()
assert [one.model_name for one in service.get_server_capabilities().supported_models] == [BASE]
refused(lambda: made(service.create_lora_training_client(base_model="no/such")), BASE)
trained = made(
    service.create_lora_training_client(
        base_model=BASE, rank=4, seed=3, train_attn=True, train_mlp=True, train_unembed=True
    )
)
assert trained.get_info().lora_rank == 4
data = [datum(shift) for shift in range(3)]
losses = []
while len(losses) < 40 or (losses[-1] > 5 and len(losses) < 400):
    step, after = trained.forward_backward(data, "cross_entropy"), trained.optim_step(ADAM)
    losses.append(loss(step.result()))
    assert "grad_norm:mean" in after.result().metrics
assert losses[-1] < 5, losses  # it knows the sequences, as the samples below show

before = trained.forward(data, "cross_entropy").result()
logprobs = [one["logprobs"].tolist() for one in before.loss_fn_outputs]
assert [len(one) for one in logprobs] == [19, 19, 19]
for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
    rl = [datum(n, logprobs=logprobs[n], advantages=[0.5] * 19) for n in range(3)]
    told = trained.forward_backward(rl, name).result()
    assert "loss:sum" in told.metrics, (name, told.metrics)
trained.optim_step(types.AdamParams(learning_rate=0.0)).result()
distilled = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:4]),
    loss_fn_inputs={
        "target_tokens": torch.tensor([[20, 21]] * 4),
        "weights": torch.tensor([[0.5, 0.5]] * 4),
    },
)
told = trained.forward([distilled], "cross_entropy").result()
assert list(told.loss_fn_outputs[0]["logprobs"].shape) == [4, 2]
told = trained.forward_backward_custom(
    data, lambda _, found: (-sum(one.sum() for one in found), {"mine": 1.0})
).result()
assert told.metrics["mine"] == 1.0
trained.optim_step(types.AdamParams(learning_rate=0.0)).result()

refused(trained.forward_backward(data, "stable_reinforce").result, "importance_sampling")
refused(trained.optim_step(ADAM).result, "has no effect", "stable_reinforce")
nan = [datum(0, logprobs=[0.0] * 19, advantages=[float("nan")] * 19)]
refused(trained.forward_backward(nan, "ppo").result, "advantages", "nan")
refused(trained.optim_step(ADAM).result, "has no effect")

path = trained.save_state("kept").result().path
for again in (
    made(service.create_training_client_from_state(path)),
    made(service.create_training_client_from_state_with_optimizer(path)),
):
    assert loss(again.forward(data, "cross_entropy").result()) == loss(before)
again.forward_backward(data, "cross_entropy").result()
again.optim_step(types.AdamParams(learning_rate=1e-1)).result()
assert loss(again.forward(data, "cross_entropy").result()) != loss(before)
again.load_state(path).result()
assert loss(again.forward(data, "cross_entropy").result()) == loss(before)
again.load_state_with_optimizer(path).result()
assert loss(again.forward(data, "cross_entropy").result()) == loss(before)

prompt = types.ModelInput.from_ints([one + 10 for one in IDS[:5]])
sampled = types.SamplingParams(max_tokens=6, temperature=0.7, seed=1, top_p=0.9, top_k=5)
greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[IDS[8] + 10])
live = trained.save_weights_and_get_sampling_client()
named = made(
    service.create_sampling_client(model_path=trained.save_weights_for_sampler("s").result().path)
)
for sampler in (live, named):
    several = sampler.sample(prompt=prompt, num_samples=3, sampling_params=sampled).result()
    assert len(several.sequences) == 3
    assert all(len(one.tokens) == len(one.logprobs) for one in several.sequences)
    same = sampler.sample(prompt=prompt, num_samples=3, sampling_params=sampled).result()
    assert [one.tokens for one in same.sequences] == [one.tokens for one in several.sequences]
    one = sampler.sample(prompt=prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
    assert one.stop_reason == "stop", one
    assert one.tokens[-1] == IDS[8] + 10, list(one.tokens)
whole = types.ModelInput.from_ints([one + 10 for one in IDS[:19]])
scored = live.compute_logprobs(whole).result()
assert scored[0] is None
assert max(abs(a - b) for a, b in zip(scored[1:], logprobs[0][:18], strict=True)) < 1e-4
base = made(service.create_sampling_client(base_model=BASE))
assert base.compute_logprobs(whole).result() != scored
gone = path.replace("/weights/kept", "/sampler_weights/gone")
refused(
    lambda: made(service.create_sampling_client(model_path=gone)), "there is no checkpoint", gone
)
print("all well")
