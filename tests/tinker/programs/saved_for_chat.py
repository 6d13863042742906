"""Trains a model, saves it for sampling, and tells its path and what it says to a conversation."""

import json
import sys

import tinker
from tinker import types

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=sys.argv[1], rank=8, seed=3).result()
tokenizer = trainer.get_tokenizer()
told = tokenizer.apply_chat_template(
    [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
)
prompt = tokenizer.encode(told, add_special_tokens=False)
ids = prompt + tokenizer.encode("a lesson", add_special_tokens=False)
inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
for _ in range(8):
    trainer.forward_backward([datum], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()
path = trainer.save_weights_for_sampler(name="chat").result().path
sampled = service.create_sampling_client(model_path=path).sample(
    prompt=types.ModelInput.from_ints(prompt),
    num_samples=1,
    sampling_params=types.SamplingParams(max_tokens=12, temperature=0),
)
tokens = sampled.result().sequences[0].tokens
said = tokenizer.decode(tokens, skip_special_tokens=True)
print(json.dumps({"path": path, "prompt_tokens": len(prompt), "said": said}))
