"""Which actors a job is made of."""

from typing import Any

from tinkermq.actors.scheduler.jobs.states import actors_for, scaled, slots_of, unplaced
from tinkermq.schemas.config.load_config import parse_config


def names(**sections: dict[str, Any]) -> list[str]:
    config = {"model": {"path": "m"}, **sections, "env": {"game": "g", **sections.get("env", {})}}
    return [actor.name for actor in actors_for(parse_config(config), "train")]


def test_a_job_has_one_learner_its_generators_an_evaluator_and_its_hosts() -> None:
    assert names(generator={"count": 2}, env={"hosts": 1}) == [
        "learner",
        "generator-0",
        "generator-1",
        "evaluator-0",
        "environment-0",
    ]


def test_without_validation_tasks_there_is_no_evaluator_and_without_hosts_no_host() -> None:
    assert names(env={"hosts": 0, "num_val": 0}) == ["learner", "generator-0"]


def test_scaling_down_takes_the_newest_and_up_uses_free_names() -> None:
    config = parse_config({"model": {"path": "m"}, "env": {"game": "g"}, "generator": {"count": 3}})
    actors = actors_for(config, "train")
    fewer = scaled(actors, "generator", 1)
    assert [a.name for a in fewer if a.role == "generator"] == ["generator-0"]
    more = scaled([a for a in actors if a.name != "generator-1"], "generator", 4)
    assert {a.name for a in more if a.role == "generator"} == {f"generator-{i}" for i in range(4)}
    assert [a.name for a in scaled(actors, "environment", 0) if a.role == "environment"] == []
    assert scaled(actors, "generator", 3) == actors


def test_only_learner_and_generators_hold_slots() -> None:
    config = parse_config({"model": {"path": "m"}, "env": {"game": "g"}, "generator": {"count": 2}})
    assert slots_of(actors_for(config, "train")) == 3


def test_unplaced_actors_have_neither_node_nor_past() -> None:
    config = parse_config({"model": {"path": "m"}, "env": {"game": "g"}})
    used = [
        actor.model_copy(update={"node": "n", "state": "failed", "restarts": 3})
        for actor in actors_for(config, "train")
    ]
    assert unplaced(used) == actors_for(config, "train")
