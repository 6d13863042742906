"""What torch allocates on a CPU, to the byte: the most that was held at once."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def largest_allocation(work: Callable[[], object]) -> int:
    """Run some work; return the most bytes that it held at once beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results  # pyright: ignore
    events = [event for event in results.events() if event.name() == "[memory]"]  # pyright: ignore
    held = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    assert events, "the profiler saw no allocation"
    return largest
