"""Games with tools for tests."""

from typing import Any

from tinkermq.envs import StepResult
from tinkermq.envs.tools import AsyncToolGame, ToolGame, ToolResult


def tool(name: str = "add", **properties: Any) -> dict[str, Any]:
    """Return a function schema of which every argument is required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": f"{name} it", "parameters": parameters}
    return {"type": "function", "function": function}


INTEGER = {"type": "integer"}


class Adding(ToolGame):
    """Add numbers with a tool; an answer of the sum ends it."""

    def __init__(self, **bounds: int) -> None:
        vars(self).update(bounds)
        self.sum = 0

    def reset(self, **_: Any) -> str:
        return "add"

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return ""

    def get_tools(self) -> list[dict[str, Any]]:
        return [tool(value=INTEGER), tool("repeat", text={"type": "string"}), tool("stop")]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if name == "add":
            self.sum += arguments["value"]
            return ToolResult(f"sum {self.sum}", reward=0.5, info={"sum": self.sum})
        if name == "repeat":
            return ToolResult(arguments["text"] * 4)
        return ToolResult("stopped", 1.0, done=True)

    def answer(self, text: str) -> StepResult:
        return StepResult("", float(text == str(self.sum)), done=True)


class AddingAsync(AsyncToolGame, Adding):
    """The same, with tools that wait."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return Adding.call_tool(self, name, arguments)


class Ending(Adding):
    """Its answers are the default's."""

    answer = ToolGame.answer


class Unnameable(Adding):
    """Its tool has a name that no model can call."""

    def get_tools(self) -> list[dict[str, Any]]:
        return [tool("add it")]
