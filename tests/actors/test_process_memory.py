"""What a process knows of its memory is what Linux counts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

FRAGMENTED = """
import torch
from tinkermq.actors.runtime import read_process_memory, return_free_memory

torch.full((8 << 20,), 1.0)  # glibc raises its bound for mappings of their own with this one's end
freed, kept = [], []
for _ in range(200):
    freed.append(torch.full((1 << 18,), 1.0))
    kept.append(torch.full((64,), 1.0))
before = read_process_memory()["resident"]
del freed
return_free_memory()
print(before - read_process_memory()["resident"])
"""


def test_what_is_free_between_other_allocations_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", FRAGMENTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 180 << 20
