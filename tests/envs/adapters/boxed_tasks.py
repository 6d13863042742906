"""A taskset of verifiers whose tasks need more than a conversation."""

# verifiers: not installed for development.
# pyright: reportMissingImports=false

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True

    @vf.reward
    async def passed(self, runtime: vf.Runtime) -> float:
        return float(bool(runtime))


class BoxedTaskset(vf.Taskset[BoxedTask]):
    """One task, to be solved in a container."""

    def load(self):
        yield BoxedTask(vf.TaskData(prompt="repair it"), self.config.task)


__all__ = ["BoxedTaskset"]
