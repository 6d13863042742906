class SchedulerStats:
    num_running_reqs: int
    kv_cache_usage: float

class IterationStats:
    num_generation_tokens: int
    num_preempted_reqs: int
