"""What an actor's heartbeat tells of its engine."""

from ...runtime import JobContext
from .engine import EngineStats


def tell_engine(context: JobContext, stats: EngineStats, **more: float) -> None:
    """Put the engine's figures, and more, into the heartbeat."""
    context.presence = context.presence.model_copy(update={"version": stats.version})
    context.numbers.update(
        tokens_per_s=stats.tokens_per_s,
        busy_share=stats.busy_share,
        running=stats.running,
        waiting=stats.waiting,
        last_pause_s=stats.last_pause_s,
        **more,
    )
