"""A learner computes with the CPU threads that its job says, whatever computed there before."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tinkermq.actors.training.parallel import check_num_threads, torch_thread
from tinkermq.schemas.wire.errors import ConfigError


@pytest.mark.parametrize("wanted", [1, 3])
def test_what_was_set_before_does_not_count(wanted: int) -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(1) as before, torch_thread(wanted) as thread:
            torch.set_num_threads(2)
            before.submit(lambda: torch.rand(1 << 20).sum()).result()
            torch.set_num_threads(wanted)
            told = f"computes with 2 CPU threads here, and learner.threads is {wanted}"
            with pytest.raises(ConfigError, match=told):  # it goes on as it began
                before.submit(check_num_threads, wanted).result()
            torch.set_num_threads(2)
            thread.submit(check_num_threads, wanted).result()
    finally:
        torch.set_num_threads(usual)
