"""Four hundred samples at once, while the session's heartbeats go on."""

import sys
import time
import urllib.request

import tinker
from tinker import types

BASE, GATEWAY = sys.argv[1:3]
NUM = 400

service = tinker.ServiceClient()
client = service.create_sampling_client(base_model=BASE)
client = client.result() if hasattr(client, "result") else client
began = time.monotonic()
samples = [
    client.sample(
        prompt=types.ModelInput.from_ints([20 + number % 20, 21, 22]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=40, seed=number),
    )
    for number in range(NUM)
]
slowest = 0.0
while not all(one.done() for one in samples):
    asked = time.monotonic()
    for path in ("/healthz", "/tinker"):
        with urllib.request.urlopen(GATEWAY + path, timeout=30) as answer:
            assert answer.status == 200, (path, answer.status)
    slowest = max(slowest, time.monotonic() - asked)
    time.sleep(0.05)
assert all(len(one.result().sequences) == 1 for one in samples)
print(f"{NUM} samples in {time.monotonic() - began:.1f} s, pages within {slowest:.2f} s")
print("all well")
