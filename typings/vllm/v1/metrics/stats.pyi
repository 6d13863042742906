class SpecDecodingStats:
    num_draft_tokens: int
    num_accepted_tokens: int

class SchedulerStats:
    num_running_reqs: int
    kv_cache_usage: float
    spec_decoding_stats: SpecDecodingStats | None

class IterationStats:
    num_generation_tokens: int
    num_preempted_reqs: int
