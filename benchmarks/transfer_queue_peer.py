"""Groups put into TransferQueue and got again; run by the interpreter of its own environment.

Arguments: tokens of an episode, seconds of each measurement, writers. Prints the groups put and
got per second as JSON.
"""

# pyright: reportMissingImports=false

import concurrent.futures as futures
import json
import sys
import time
from typing import Any, cast

import ray as untyped_ray
import torch
import transfer_queue as untyped_queue

TOKENS, SECONDS, WRITERS = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
EPISODES = 8
ray, queue = cast(Any, untyped_ray), cast(Any, untyped_queue)
ids = torch.arange(TOKENS, dtype=torch.int32).repeat(EPISODES, 1)
FIELDS = {
    "token_ids": ids,
    "mask": torch.ones(EPISODES, TOKENS, dtype=torch.uint8),
    "logprobs": torch.zeros(EPISODES, TOKENS),
    "versions": ids.clone(),
}


def put(writer: int) -> int:
    """Put groups until the time is over; return how many."""
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        queue.kv_put(f"{writer}-{done}", "train", FIELDS)
        done += 1
    return done


def get(writer: int, there: int) -> int:
    """Get a writer's groups until the time is over or there are no more; return how many."""
    started = time.perf_counter()
    for number in range(there):
        if time.perf_counter() - started > SECONDS:
            return number
        found = queue.kv_batch_get(f"{writer}-{number}", "train")
        assert torch.equal(found["token_ids"].unbind()[0], ids)
    return there


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
queue.init()
queue.kv_put("first", "train", FIELDS)  # what is made at the first call is not measured
with futures.ThreadPoolExecutor(WRITERS) as threads:
    begun = time.perf_counter()
    written = list(threads.map(put, range(WRITERS)))
    puts = sum(written) / (time.perf_counter() - begun)
    begun = time.perf_counter()
    gets = sum(threads.map(get, range(WRITERS), written)) / (time.perf_counter() - begun)
print(json.dumps({"put": puts, "got": gets}))
queue.close()
ray.shutdown()
