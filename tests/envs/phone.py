"""A stand-in for a phone, at the edge to the devices: one app that keeps notes.

It has the interface of android_world's AsyncEnv, TaskEval and JSONAction as far as the game uses
them. It shows what the game makes of a device's answers; it shows nothing about real devices.
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from tinkermq.schemas.wire.errors import GameError

WORDS = ("milk", "bread", "apples", "rice")


@dataclass
class Box:
    x_min: int
    x_max: int
    y_min: int
    y_max: int


@dataclass
class Element:
    text: str
    class_name: str = "android.widget.Button"
    bbox_pixels: Any = field(default_factory=lambda: Box(0, 100, 0, 40))
    is_editable: bool = False
    is_visible: bool = True
    is_enabled: bool = True
    content_description: Any = None
    hint_text: Any = None
    is_checked: Any = None
    is_selected: Any = None
    is_focused: Any = None
    is_scrollable: Any = None
    is_long_clickable: Any = None


@dataclass
class State:
    ui_elements: list[Element]
    pixels: Any


@dataclass
class Action:
    action_type: str
    index: int | None = None
    text: str | None = None
    app_name: str | None = None
    direction: str | None = None
    goal_status: str | None = None

    def __post_init__(self):
        if self.action_type not in {"click", "input_text", "open_app", "answer", "navigate_home"}:
            raise ValueError(f"Invalid action type: {self.action_type}")


class Phone:
    """One device: an open app, the text in its field, and the notes that were saved."""

    logical_screen_size = (100, 200)

    def __init__(self):
        self.app = ""
        self.typed = ""
        self.saved = []
        self.interaction_cache = ""
        self.calls = []

    def reset(self, go_home=False):
        self.app, self.typed, self.interaction_cache = "", "", ""

    def get_state(self, wait_to_stabilize=False):
        home = [Element("Notes"), Element("hidden", is_visible=False)]
        notes = [
            Element(self.typed, "android.widget.EditText", is_editable=True),
            Element("Save"),
            Element("off", bbox_pixels=Box(0, 100, 300, 340)),
        ]
        return State(notes if self.app else home, np.zeros((2, 2, 3), np.uint8))

    def execute_action(self, action):
        self.calls.append(action.action_type)
        if action.action_type == "answer":
            self.interaction_cache = action.text
        elif action.action_type == "open_app" or (action.action_type == "click" and not self.app):
            self.app = "Notes"
        elif action.action_type == "input_text":
            self.typed = action.text
        elif action.action_type == "click" and action.index == 1:
            self.saved.append(self.typed)


class SaveNote:
    """Write and save a note; its parameters come from the process-wide generator."""

    start_on_home_screen = True
    log: ClassVar[list[str]] = []

    def __init__(self, params):
        self.params = params
        self.goal = f"Save a note that says {params['word']}."

    @classmethod
    def generate_random_params(cls):
        return {"word": random.choice(WORDS)}

    def initialize_task(self, env):
        self.log.append("initialize")
        random.seed(self.params["seed"])  # as android_world's own tasks do
        env.saved = []

    def is_successful(self, env):
        return float(self.params["word"] in env.saved)

    def tear_down(self, env):
        self.log.append("tear down")


class CountNotes(SaveNote):
    """Answer a question; the answer is what the device remembers."""

    def __init__(self, params):
        super().__init__(params)
        self.goal = "How many notes are there?"

    def is_successful(self, env):
        return float(env.interaction_cache == "0")


class OnePhone:
    """An edge to one phone that works."""

    def __init__(self):
        self.phone = Phone()

    def check(self, number):
        pass

    def name(self, number):
        return f"stand-in-{os.getpid()}-{number}"

    def connect(self, number):
        return self.phone

    def tasks(self, family):
        return {"SaveNote": SaveNote, "CountNotes": CountNotes}

    def action(self, fields):
        return Action(**fields)


class NoPhone(OnePhone):
    """An edge to nothing."""

    def check(self, number):
        raise GameError("the cable is out")
