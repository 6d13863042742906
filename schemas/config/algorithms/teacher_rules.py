"""Rules between teachers and other sections (`rules.py` has all others)."""

from ..section import Rule

TEACHER_RULES = (
    Rule(
        "algorithm.teacher",
        lambda job: job.algorithm.asked_teachers and job.rollout.temperature != 1,
        "is asked for log-probs at temperature 1, and rollout.temperature is "
        "{rollout.temperature}: set it to 1, or name a model that the learner loads",
    ),
    Rule(
        "algorithm.teacher",
        lambda job: job.algorithm.asked_teachers and job.training.tasks == "external",
        "is asked by the pool's generators, and training.tasks=external has none: name a model "
        "that the learner loads",
    ),
    Rule(
        "algorithm.teacher_context",
        lambda job: job.algorithm.teacher_context and job.agent.runs_programs,
        "belongs to the first prompt of a game, and programs make theirs themselves: remove it",
    ),
    Rule(
        "algorithm.teacher_context_tokens",
        lambda job: (
            job.algorithm.teacher_context
            and job.rollout.max_tokens + job.algorithm.teacher_context_tokens
            > job.learner.row_tokens
        ),
        "({algorithm.teacher_context_tokens}) and rollout.max_tokens ({rollout.max_tokens}) are "
        "over learner.row_tokens ({learner.row_tokens}): raise it with learner.microbatch_tokens",
    ),
)
