"""What a sampling client can be asked for, checked against transformers and the trainer."""

import math
import sys
from typing import Any

import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

BASE = sys.argv[1]
IDS = list(range(20, 40))
PROMPT = types.ModelInput.from_ints(IDS)
TOP = 4


def same(found: list[float | None], expected: list[float]) -> None:
    """Compare log-probs, of which the first token has none."""
    assert found[0] is None
    torch.testing.assert_close(torch.tensor(found[1:]), torch.tensor(expected), atol=1e-5, rtol=0)


def scored(client: Any) -> Any:
    """Score the prompt, and draw two continuations."""
    return client.sample(
        prompt=PROMPT,
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=5, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=TOP,
    ).result()


def steps(count: int) -> None:
    """Train the prompt."""
    for _ in range(count):
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()


service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
datum = types.Datum(
    model_input=types.ModelInput.from_ints(IDS[:-1]),
    loss_fn_inputs={"target_tokens": IDS[1:], "weights": [1.0] * (len(IDS) - 1)},
)

model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
with torch.no_grad():
    plain = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
base = service.create_sampling_client(base_model=BASE).result()
told = scored(base)
same(told.prompt_logprobs, [plain[n, token].item() for n, token in enumerate(IDS[1:])])
same(base.compute_logprobs(PROMPT).result(), told.prompt_logprobs[1:])
likeliest = plain.topk(TOP)
assert told.topk_prompt_logprobs[0] is None
for place, found in enumerate(told.topk_prompt_logprobs[1:]):
    assert [token for token, _ in found] == likeliest.indices[place].tolist()
    for (_, logprob), expected in zip(found, likeliest.values[place].tolist(), strict=True):
        assert math.isclose(logprob, expected, abs_tol=1e-5)

steps(3)
fixed = trainer.save_weights_and_get_sampling_client().result()
moving = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
before = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
same(fixed.compute_logprobs(PROMPT).result(), list(before))
long = moving.sample(
    prompt=PROMPT,
    num_samples=2,
    sampling_params=types.SamplingParams(max_tokens=200, stop=[]),
)
steps(3)
newer = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
after = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
assert before != after
for client in (newer, moving):
    same(client.compute_logprobs(PROMPT).result(), list(after))
same(fixed.compute_logprobs(PROMPT).result(), list(before))
assert all(len(one.tokens) == 200 for one in long.result().sequences)

many = [
    client.sample(
        prompt=types.ModelInput.from_ints(IDS[: 1 + number % 19]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=8, stop=[]),
    )
    for number in range(171)
    for client in (base, fixed, moving)
]
assert len(many) > 512
assert all(len(one.result().sequences[0].tokens) == 8 for one in many)
print("all well")
