"""Small ALFWorld games in the package's own format: its domain, grammar and goals, a small room.

Each game has a `traj_data.json` and a `game.tw-pddl` with the walkthrough that the package's own
planner finds.
"""

# alfworld and textworld: not installed for development.
# pyright: reportMissingImports=false

import json
import random
from pathlib import Path

KINDS = {
    "pick_and_place_simple": ("Mug", "Desk", ""),
    "look_at_obj_in_light": ("Pen", "Desk", "DeskLamp"),
    "pick_clean_then_place_in_recep": ("Mug", "Shelf", ""),
    "pick_heat_then_place_in_recep": ("Mug", "Desk", ""),
    "pick_cool_then_place_in_recep": ("Mug", "Shelf", ""),
    "pick_two_obj_and_place": ("Pen", "Drawer", ""),
}
RECEPTACLES = ("Desk", "Shelf", "Drawer", "Sink_SinkBasin", "Microwave", "Fridge")
OPENABLE = ("Drawer", "Microwave", "Fridge")
SPLITS = {"train": 2, "valid_seen": 1, "valid_unseen": 1}
"""Folders of the splits, and how many games of each type they get."""


def make_household(root: Path) -> Path:
    """Write games of all six types into `root`/json_2.1.1; return `root`."""
    for split, count in SPLITS.items():
        for number, task_type in enumerate(KINDS):
            for trial in range(count):
                name = f"{task_type}-{number}/trial_T{trial}"
                write_game(root / "json_2.1.1" / split / name, task_type, seed=trial)
    return root


def write_game(folder: Path, task_type: str, seed: int) -> None:
    """Write one game and its walkthrough."""
    from alfworld.agents.utils.misc import add_task_to_grammar
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    rng = random.Random(f"{task_type}{seed}")
    target, receptacle, lamp = KINDS[task_type]
    trajectory = {
        "task_type": task_type,
        "pddl_params": {
            "object_target": target,
            "parent_target": receptacle,
            "toggle_target": lamp,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "turk_annotations": {"anns": [{"task_desc": f"the {target} task"}]},
    }
    grammar = add_task_to_grammar(
        Path(ALFRED_TWL2_PATH).read_text(), trajectory, goal_desc_human_anns_prob=1.0, rng=rng
    )
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": grammar,
        "pddl_problem": problem(task_type, rng),
        "solvable": True,
    }
    game["walkthrough"] = solve(game)
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text(json.dumps(trajectory))
    (folder / "game.tw-pddl").write_text(json.dumps(game))


def problem(task_type: str, rng: random.Random) -> str:
    """Return a room with its receptacles and objects, and the package's goal of the type."""
    import alfworld.gen.goal_library as goals

    target, receptacle, lamp = KINDS[task_type]
    places = {kind: f"{kind.partition('_')[0]}_bar_{kind}" for kind in RECEPTACLES}
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_0)"]
    for number, (kind, place) in enumerate(places.items(), 1):
        short = kind.rpartition("_")[2]
        facts += [
            f"(receptacleType {place} {short}Type)",
            f"(receptacleAtLocation {place} loc_bar_{number})",
            *([f"(openable {place})"] if kind in OPENABLE else []),
            *(f"(canContain {short}Type {thing}Type)" for thing in ("Mug", "Pen")),
        ]
    things = {"Mug_bar_1": "Shelf", "Pen_bar_1": "Desk", "Pen_bar_2": "Shelf"}
    for thing in things:
        sort = thing.partition("_")[0]
        home = rng.choice(["Shelf", "Drawer", "Desk"])
        if sort == target and home == receptacle:
            home = "Fridge"
        facts += [
            f"(inReceptacle {thing} {places[home]})",
            f"(objectType {thing} {sort}Type)",
            *(f"({what} {thing})" for what in ("pickupable", "cleanable", "heatable", "coolable")),
        ]
    facts += [
        "(objectType DeskLamp_bar_1 DeskLampType)",
        "(toggleable DeskLamp_bar_1)",
        f"(inReceptacle DeskLamp_bar_1 {places['Desk']})",
    ]
    locations = " ".join(f"loc_bar_{number}" for number in range(len(places) + 1))
    sorts = " ".join(f"{kind.rpartition('_')[2]}Type" for kind in RECEPTACLES)
    goal = goals.gdict[task_type]["pddl"].replace("#", "-")
    return f"""(define (problem household) (:domain alfred)
      (:objects agent1 - agent {locations} - location {" ".join(places.values())} - receptacle
        {" ".join([*things, "DeskLamp_bar_1"])} - object {sorts} - rtype
        MugType PenType DeskLampType - otype)
      (:init {" ".join(facts)})
      {goal.format(obj=target, recep=receptacle, toggle=lamp)}"""


def solve(game: dict) -> list[str]:
    """Return the commands that the package's planner finds."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv

    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(extras=["walkthrough"])))
    env.load(game)
    return env.reset()["extra.walkthrough"]
