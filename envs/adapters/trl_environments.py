"""Environment classes that were written for TRL's `GRPOTrainer(environment_factory=…)`.

`env.game` is `trl:module:Class`. The class's public methods are the policy's tools, with schemas
from their signatures and docstrings as transformers makes them. `reset` gets the columns of a row
and returns None or a text, which is appended to the last message of the row's prompt. The episode
ends with a turn that calls no tool; then `get_reward`, where there is one, and the reward functions
of `env.kwargs.reward_funcs` score it, as they do where a limit ends it.

The class may be replaced by a function that returns an instance, or by a map of such factories by
name. Then the column `environment` chooses one, and only its tools are shown. A list with commas is
such a map: `trl:words=games:Words,count=games:Counter`.
"""

import asyncio
import inspect
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import FunctionType, NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ...schemas.chat_messages import read_object
from ...schemas.tool_calls import parse_tool_calls
from ...schemas.wire.errors import GameError, RewardError
from ...schemas.wire.foreign import lines_of, shown, words_of
from ..game import ChatMessage, StepResult
from ..prompt import resolve
from ..reasoning import behind_reasoning
from ..registry import import_object
from ..running.global_random import GlobalRandom
from ..tools import ToolGame, ToolResult, ToolTurn, checked_tools

NO_TOOLS = ("reset", "get_reward")
"""Public methods that are not tools."""
COLUMN = "environment"
"""The column of a row that chooses among several environments."""

Factory: TypeAlias = Callable[[], Any]


# -- the game --------------------------------------------------------------------------------------


class TrlGame(ToolGame):
    """Play environment classes of TRL; `game_of` makes a subclass for given ones."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    takes_rows: ClassVar[bool] = True
    named_arguments: ClassVar[tuple[str, ...]] = ("reward_funcs",)
    target: ClassVar[str] = ""
    """Origin of the environments, for messages."""
    factories: ClassVar[dict[str, Factory]] = {}
    """Factories by the name in the column `environment`; "" for a single one."""

    def __init__(
        self,
        reward_funcs: str | Sequence[str] | None = (),
        reward_weights: Sequence[float] | None = None,
        max_result_chars: int = ToolGame.max_result_chars,
        max_calls: int = ToolGame.max_calls,
        max_tool_turns: int = ToolGame.max_tool_turns,
    ) -> None:
        """Read the environments.

        `reward_funcs` are TRL's reward functions, each `module:function`, and `reward_weights` one
        number for each. Null means that `env.reward` scores the episodes. The bounds are those of
        ToolGame. Raises GameError for environments that cannot be used.
        """
        self._tools = tools_of(type(self))
        self._functions_of_reward = _reward_functions(reward_funcs, reward_weights)
        self._is_rewarded = reward_funcs is not None
        has_reward = reward_funcs is None or bool(self._functions_of_reward)
        for name, factory in self.factories.items():
            if not has_reward and not hasattr(_class_of(factory), "get_reward"):
                raise _no_reward(name or self.target)
        self.max_result_chars = max_result_chars
        self.max_calls = max_calls
        self.max_tool_turns = max_tool_turns
        self._name = ""
        self._environment: Any = None
        self._row: dict[str, Any] = {}
        self._prompt: list[ChatMessage] = []
        self._completion: list[ChatMessage] = []
        self._num_failed = 0
        self._dice: GlobalRandom

    def reset(self, *, row: Mapping[str, Any] | None = None, **kwargs: Any) -> str:
        """Make an instance and reset it with the columns of the row."""
        self._row = {**(row or {}), **kwargs}
        self._name = self._chosen()
        columns = {**self._row}
        if "" not in self.factories:
            columns.pop(COLUMN, None)
        self._dice = GlobalRandom(self.rng.getrandbits(31))
        with self._dice.lent():
            self._environment = self.factories[self._name]()
            opening = _waited(self._environment.reset(**columns))
        if opening is not None and not isinstance(opening, str):
            raise GameError(
                f"reset of {self.get_interaction_name()} returned {shown(opening)}",
                hint="return None, or the text that is appended to the last message",
            )
        opening = opening or ""
        self._prompt = [{"role": "user", "content": opening}]
        return opening

    def complete_prompt(self, messages: list[ChatMessage], opening: str) -> list[ChatMessage]:
        """Append the result of `reset` to the last message, as TRL does."""
        last = messages[-1]
        content = last["content"]
        if isinstance(content, list):
            parts = cast("list[Any]", content)
            content = [*parts, {"type": "text", "text": opening}] if opening else parts
        else:
            content = f"{content}{opening}"
        self._prompt = [*messages[:-1], {**last, "content": content}]
        return self._prompt

    def get_interaction_name(self) -> str:
        """Return the name of the environment's class."""
        names = [_class_of(self.factories[name]).__name__ for name in self._names()]
        return "+".join(names)

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the tools of the environment; none before a row has selected one of several."""
        return self._tools.get(self._name, [])

    def tools_by_environment(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tools of each environment that a row may choose."""
        return {} if "" in self.factories else self._tools

    def describe(self) -> dict[str, str]:
        """Return the sources of rewards and tasks."""
        classes = dict.fromkeys(map(_class_of, self.factories.values()))
        sources = [f"{kind.__name__}.get_reward" for kind in classes if hasattr(kind, "get_reward")]
        for function, weight in self._functions_of_reward:
            module = getattr(function, "__module__", type(function).__module__)
            sources.append(f"{weight:g} × {module}:{_name_of(function)}")
        tasks = "rows, whose columns reset gets; without data, reset makes them"
        if "" not in self.factories:
            tasks = f"rows, whose column {COLUMN} is {' or '.join(self.factories)}"
        return {"rewards": " + ".join(sources) or "env.reward alone", "tasks": tasks}

    def get_state(self) -> dict[str, Any]:
        """Return the plain attributes of the environment."""
        fields: dict[str, Any] = getattr(self._environment, "__dict__", {})
        return {
            name: value
            for name, value in fields.items()
            if not name.startswith("_") and isinstance(value, str | int | float | bool | None)
        }

    def step(self, action: str) -> StepResult:
        """Run the calls of a turn, or reward an answer."""
        self._completion.append(_assistant_message(action))
        return super().step(action)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a method; its exception becomes the result, as in TRL."""
        try:
            with self._dice.lent():
                result = _waited(getattr(self._environment, name)(**arguments))
        except Exception as error:  # noqa: BLE001 - TRL shows it to the policy, whatever it is
            self._num_failed += 1
            result = {"error": str(error)}
        return ToolResult(_text_of(result))

    def ends_with(self, turn: ToolTurn) -> bool:
        """Record the results, for reward functions."""
        for call, text in zip(turn.calls, turn.texts, strict=False):
            name = call[0] if call is not None else ""
            self._completion.append({"role": "tool", "name": name, "content": text})
        return super().ends_with(turn)

    def answer(self, text: str) -> StepResult:
        """End the episode with its reward."""
        return self.finish_early()

    def finish_early(self) -> StepResult:
        """Return the sum of `get_reward` and the reward functions, and each of them."""
        rewards: list[tuple[str, float]] = []
        info: dict[str, Any] = {}
        with self._dice.lent():
            if hasattr(self._environment, "get_reward"):
                name = type(self._environment).__name__
                reward = _waited(self._environment.get_reward())
                if reward is not None:
                    rewards.append((name, _number(reward, f"{name}.get_reward")))
            for function, weight in self._functions_of_reward:
                reward = self._call_reward_function(function, info)
                if reward is not None:
                    rewards.append((_name_of(function), weight * reward))
        if not rewards and self._is_rewarded:
            raise RewardError(
                f"no reward function of {self.get_interaction_name()} returned a reward for this "
                "episode, only None",
                hint="let at least one of them return a number for each episode",
            )
        keys = _distinct(name for name, _ in rewards)
        info |= {f"reward_{key}": reward for key, (_, reward) in zip(keys, rewards, strict=True)}
        total = sum(reward for _, reward in rewards)
        return StepResult("", total, done=True, info=info | self._counts())

    def _counts(self) -> dict[str, int]:
        return {**super()._counts(), "failed_calls": self._num_failed}

    def _names(self) -> list[str]:
        return [self._name] if self._name in self.factories else list(self.factories)

    def _chosen(self) -> str:
        """Return the name of the environment that a row chooses."""
        if "" in self.factories:
            return ""
        name = self._row.get(COLUMN)
        if name not in self.factories:
            raise GameError(
                f"the row's column {COLUMN} is {shown(name)}, the environments are "
                f"{', '.join(self.factories)}",
                hint=f"name one of them in the column {COLUMN} of each row",
            )
        return str(name)

    def _call_reward_function(
        self, function: Callable[..., Any], info: dict[str, Any]
    ) -> float | None:
        """Call a reward function as TRL does: with lists, of this one episode."""
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}

        def log_extra(column: str, values: Sequence[Any]) -> None:
            info[column] = values[0]

        def log_metric(name: str, value: float) -> None:
            info[name] = float(value)

        arguments = {
            "prompts": [self._prompt],
            "completions": [self._completion],
            **columns,
            "environments": [self._environment],
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        try:
            rewards = _waited(function(**_taken(function, arguments)))
            listed = list(rewards)
        except Exception as error:
            raise RewardError(
                f"the reward function {_name_of(function)} failed: {words_of(error)}\n"
                f"{lines_of(error, (__file__,))}",
                hint="it is called with lists of one prompt, one completion and one environment",
            ) from error
        if len(listed) != 1:
            raise RewardError(
                f"the reward function {_name_of(function)} returned {len(listed)} rewards for one "
                "completion",
                hint="return a list with one number, or None, for each completion",
            )
        return None if listed[0] is None else _number(listed[0], _name_of(function))


def _assistant_message(action: str) -> ChatMessage:
    """Return a turn as TRL passes it to reward functions: text and calls."""
    answer = behind_reasoning(action)
    content, calls = parse_tool_calls(answer)
    message: ChatMessage = {"role": "assistant", "content": content}
    if thought := action[: len(action) - len(answer)].strip():
        message["reasoning_content"] = thought
    if calls:
        functions = [call["function"] for call in calls]
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": read_object(function["arguments"]),
                },
            }
            for function in functions
        ]
    return message


def _text_of(result: Any) -> str:
    """Return the result of a method as the text of a tool message.

    A list of text parts is their text. Raises GameError for a list with anything else.
    """
    listed = cast("list[Any]", result) if isinstance(result, list) else []
    if not (listed and all(map(_is_part, listed))):
        return str(cast("object", result))
    parts = cast("list[dict[str, Any]]", listed)
    if other := next((part for part in parts if part["type"] != "text"), None):
        raise GameError(
            f"a tool returned a part of type {shown(other['type'])}",
            hint="results of tools are texts here: return what the picture shows as a text",
        )
    return "\n".join(str(part.get("text", "")) for part in parts)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and "type" in value


def _number(value: Any, source: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{source} returned {shown(value)}", hint="a reward is a number"
        ) from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop for coroutines of environments, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-environments", daemon=True).start()
    return loop


def _waited(value: Any) -> Any:
    """Return the result of a method, which may be a coroutine."""
    if not inspect.isawaitable(value):
        return value
    return asyncio.run_coroutine_threadsafe(resolve(value), _loop()).result()


# -- reward functions ------------------------------------------------------------------------------

_UNKNOWN_HERE = {
    "completion_ids": "tokens are not known where rewards are computed",
    "trainer_state": "there is no trainer in the process that plays an episode",
}


def _reward_functions(
    targets: str | Sequence[str] | None, weights: Sequence[float] | None
) -> list[tuple[Callable[..., Any], float]]:
    names = [targets] if isinstance(targets, str) else list(targets or ())
    if weights is not None and len(weights) != len(names):
        raise GameError(
            f"env.kwargs.reward_weights has {len(weights)} numbers for {len(names)} functions",
            hint="give one weight for each of env.kwargs.reward_funcs",
        )
    functions = [_reward_function(name) for name in names]
    return list(zip(functions, weights or [1.0] * len(names), strict=True))


def _reward_function(target: str) -> Callable[..., Any]:
    _, function = import_object(target)
    if not callable(function):
        raise GameError(
            f"env.kwargs.reward_funcs names {target!r}, and there is no such function",
            hint="name a function as module:function",
        )
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _UNKNOWN_HERE and parameter.default is parameter.empty:
            raise GameError(
                f"the reward function {target} asks for {name}: {_UNKNOWN_HERE[name]}",
                hint=f"leave {name} out of its parameters, or give it a default",
            )
    return function


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name by which TRL shows a reward function: of an instance, that of its class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _distinct(names: Iterable[str]) -> Iterator[str]:
    """Yield the names; the second of one name ends in `_2`, and so on."""
    count = Counter[str]()
    for name in names:
        count[name] += 1
        yield name if count[name] == 1 else f"{name}_{count[name]}"


def _taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts: all of them if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _no_reward(name: str) -> GameError:
    return GameError(
        f"{name} has no get_reward, and env.kwargs.reward_funcs is empty: nothing would be learnt",
        hint="write get_reward, name reward functions as module:function, or set "
        "env.kwargs.reward_funcs=null where env.reward scores the episodes",
    )


# -- environments and their tools ------------------------------------------------------------------


def game_of(target: str) -> type[TrlGame]:
    """Return the game of `module:Class`, or of `name=module:Class,…`.

    Raises GameError for a class that cannot be imported or is not an environment.
    """
    factories = dict[str, Factory]()
    for name, place in _parts(target):
        _, value = import_object(place)
        found_by_name = _factories_in(value, place, name)
        if clashing := factories.keys() & found_by_name.keys():
            raise GameError(
                f"trl:{target} has two environments of the name {', '.join(clashing)}",
                hint="name them: trl:one=module:Class,other=module:Class",
            )
        factories |= found_by_name
    fields = {"target": target, "factories": factories, "__module__": __name__}
    return type(f"trl:{target}", (TrlGame,), fields)


BASE = TrlGame


def modules_of(target: str) -> list[str]:
    """Return the modules that `game_of` imports."""
    return [place.partition(":")[0] for _, place in _parts(target)]


def _parts(target: str) -> list[tuple[str, str]]:
    """Return the names and paths of environments; a single one has no name."""
    parts = [part.strip() for part in target.split(",")]
    for part in parts:
        if not re.fullmatch(r"([^=:]+=)?[\w.]+:[\w.]+", part):
            raise GameError(
                f"env.game is trl:{target}",
                hint="write trl:module:Class, or trl:name=module:Class,name=module:Class",
            )
    if len(parts) == 1 and "=" not in target:
        return [("", target)]
    named = [part.rpartition("=") for part in parts]
    return [(name or place.rpartition(":")[2], place) for name, _, place in named]


def _factories_in(value: Any, target: str, name: str) -> dict[str, Factory]:
    """Return factories of environments, by name; a map of TRL has names of its own."""
    if isinstance(value, Mapping) and not name:
        by_name = cast("Mapping[Any, Any]", value)
        return {
            str(key): factory
            for key, value in by_name.items()
            for factory in _factories_in(value, f"{target}[{key!r}]", str(key)).values()
        }
    factory = cast("object", value)
    if not callable(factory):
        kind = "there is no such name" if factory is None else f"it is {shown(factory)}"
        raise GameError(
            f"trl:{target} is not an environment: {kind}",
            hint="name a class with reset and public methods, or a function that returns an "
            "instance of one",
        )
    return {name: factory}


def _class_of(factory: Factory) -> type:
    """Return the class of a factory's instances."""
    return factory if isinstance(factory, type) else _made(factory)


@cache
def _made(factory: Factory) -> type:
    environment: object = factory()
    return type(environment)


@cache
def tools_of(game_class: type[TrlGame]) -> dict[str, list[dict[str, Any]]]:
    """Return the tools of each environment, by its name.

    Raises GameError for a class without `reset` or tools, and a method that cannot be a tool.
    """
    return {
        name: _tools_of_class(_class_of(factory)) for name, factory in game_class.factories.items()
    }


def _tools_of_class(environment: type) -> list[dict[str, Any]]:
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    methods = {name: method for name, method in members if not name.startswith("_")}
    if "reset" not in methods:
        raise GameError(
            f"{environment.__name__} is not an environment of TRL: it has no method reset",
            hint="write `def reset(self, **kwargs) -> str | None`",
        )
    tools = [
        tool_schema(
            method,
            f"{environment.__name__}.{name}",
            has_self=not isinstance(inspect.getattr_static(environment, name), staticmethod),
        )
        for name, method in methods.items()
        if name not in NO_TOOLS
    ]
    if not tools:
        raise GameError(
            f"{environment.__name__} has no tools: no public method besides reset and get_reward",
            hint="write the policy's actions as public methods with types and docstrings",
        )
    return checked_tools(tools, environment.__name__)


# -- schemas of methods, as transformers makes them, without its import of torch -------------------

_SIMPLE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"\s*(Args|Returns|Raises):\s*(.*)")
_ARGUMENT = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*\Z", re.IGNORECASE)


def tool_schema(method: FunctionType, name: str, *, has_self: bool = True) -> dict[str, Any]:
    """Return a method as a function schema, from its signature and its docstring in Google's style.

    `name` is its name in errors; a static method has no `self`. Raises GameError for a missing
    docstring, type, or description of a parameter, and for a type that JSON cannot express.
    """
    doc = inspect.getdoc(method)
    if not doc:
        raise _untold(name, "has no docstring", "describe there what the tool does")
    sections = _sections(doc)
    described = dict(_described(sections["Args"]))
    try:
        hints = get_type_hints(method)
    except Exception as error:
        raise _untold(name, f"has types that cannot be read: {error}", "import them") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(method).parameters.values())[has_self:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _untold(name, f"takes any arguments (*{parameter.name})", "name each of them")
        if parameter.name not in hints:
            raise _untold(
                name, f"has no type for {parameter.name}", f"write {parameter.name}: str, …"
            )
        if parameter.name not in described:
            raise _untold(
                name,
                f"has no description of {parameter.name} in its docstring",
                f"write the line `{parameter.name}: …` below `Args:`",
            )
        schema = _schema_of(hints[parameter.name], name)
        properties[parameter.name] = _with_text(schema, described[parameter.name], name)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    function: dict[str, Any] = {
        "name": method.__name__,
        "description": "\n".join(sections[""]).strip(),
        "parameters": {**parameters, "required": required} if required else parameters,
    }
    if "return" in hints:
        text = "\n".join(sections["Returns"]).strip()
        returned = _schema_of(hints["return"], name)
        function["return"] = {**returned, "description": text} if text else returned
    return {"type": "function", "function": function}


def _untold(name: str, problem: str, remedy: str) -> GameError:
    return GameError(
        f"{name} cannot be a tool: it {problem}", hint=f"{remedy}; or begin its name with _"
    )


def _sections(doc: str) -> dict[str, list[str]]:
    """Return the lines of a docstring by section; "" is the part before the first."""
    sections: dict[str, list[str]] = {"": [], "Args": [], "Returns": [], "Raises": []}
    present = ""
    for line in doc.splitlines():
        begins = _SECTION.fullmatch(line)
        if begins:
            present = begins[1]
        sections[present].append((begins[2] if begins else line).strip() if present else line)
    return sections


def _described(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the described parameters with their texts, which may span lines."""
    name, texts = "", list[str]()
    for line in lines:
        if begins := _ARGUMENT.fullmatch(line):
            if name:
                yield name, " ".join(filter(None, texts))
            name, texts = begins[1], [begins[2].strip()]
        else:
            texts.append(line.strip())
    if name:
        yield name, " ".join(filter(None, texts))


def _with_text(schema: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    """Return a parameter's schema with its description, whose end may list choices."""
    choices = _CHOICES.search(text)
    if choices is None:
        return {**schema, "description": text}
    try:
        listed = cast("list[Any]", json.loads(choices[1]))
    except ValueError as error:
        raise _untold(
            name, f"has choices that are not JSON: {choices[1]}", "write a list"
        ) from error
    enum = [choice.strip() if isinstance(choice, str) else choice for choice in listed]
    return {**schema, "enum": enum, "description": text[: choices.start()].strip()}


def _schema_of(hint: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin: Any = get_origin(hint)
    arguments: tuple[Any, ...] = get_args(hint)
    of = partial(_schema_of, name=name)
    if origin is None:
        return dict(_SIMPLE.get(hint, {"type": "object"}))
    if origin in (Union, UnionType):
        return _union(
            [of(argument) for argument in arguments if argument is not NoneType],
            NoneType in arguments,
        )
    if origin is Literal:
        types = list(dict.fromkeys(_SIMPLE[type(value)]["type"] for value in arguments))
        return {"type": types[0] if len(types) == 1 else types, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": of(arguments[0])}
    if origin is tuple and ... not in arguments and len(arguments) != 1:
        return {"type": "array", "prefixItems": [of(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": of(arguments[-1])}
    raise _untold(name, f"has the type {hint}, which JSON cannot express", "use a simpler one")


def _union(schemas: list[dict[str, Any]], may_be_null: bool) -> dict[str, Any]:
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        types = sorted({cast("str", schema["type"]) for schema in schemas})
        schema = {"type": types[0] if len(types) == 1 else types}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if may_be_null else schema
