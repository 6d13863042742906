"""Tasksets of verifiers, as a user's package would hold them; one class each, by environment."""

# verifiers: not installed for development.
# pyright: reportMissingImports=false

import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word[::-1])

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class WordTaskset(vf.Taskset[WordTask]):
    """Say a word backwards; one turn."""

    def load(self):
        for word in ("stone", "river", "cloud", "night"):
            yield WordTask(
                WordData(prompt=f"Reverse {word}", system_prompt="One word.", word=word),
                self.config.task,
            )


__all__ = ["WordTaskset"]
