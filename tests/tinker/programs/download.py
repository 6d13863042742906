"""Download checkpoints with the cookbook and open them with PEFT; print `all well` at the end."""

import sys
from pathlib import Path

import tinker
from tinker_cookbook import weights

service = tinker.ServiceClient()
trained = service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=3).result()
state = trained.save_state("state").result().path
exported = trained.save_weights_external("out").result().path
folders = [
    Path(weights.download(tinker_path=one, output_dir=f"downloaded-{n}"))
    for n, one in enumerate((state, exported))
]
for name in ("adapter_config.json", "adapter_model.safetensors"):
    first, second = ((folder / name).read_bytes() for folder in folders)
    assert first == second, name
print("all well")
