"""The staleness gate: how far generation may run ahead of training.

A credit is the right to issue one task. Each version brings `batch_size` credits, and each group
that will never be trained (dropped, filtered, given up) gives its own back: otherwise a batch
would lack groups that nobody may generate. The *slot* of a task is the number of tasks issued
before it minus the credits returned before it. It takes the place of the task's number in every
rule, because numbers grow with each return and slots do not: under the gate
`slot // batch_size <= version + max_staleness`, so `min_version` never asks for a version that
the learner has yet to make, and nothing waits for itself.
"""


def num_admissible(
    version: int,
    max_staleness: int,
    batch_size: int,
    returned_credits: int,
    total_steps: int | None = None,
) -> int:
    """Count the tasks that may have been issued by now, since the start of the job.

    With `total_steps` no task is issued that no step would train.
    """
    steps = version + max_staleness + 1
    if total_steps is not None:
        steps = min(steps, total_steps)
    return steps * batch_size + returned_credits


def min_version(slot: int, batch_size: int, max_staleness: int) -> int:
    """Give the oldest version that may begin the task in `slot`."""
    return max(0, slot // batch_size - max_staleness)
