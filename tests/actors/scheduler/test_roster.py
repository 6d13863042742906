"""Which actors a job is made of."""

from typing import Any

from tinkermq.actors.scheduler.jobs.states import actors_for, scaled, slots_of, unplaced
from tinkermq.schemas.config.load_config import parse_config


def names(**sections: dict[str, Any]) -> list[str]:
    config = {"model": {"path": "m"}, **sections, "env": {"game": "g", **sections.get("env", {})}}
    return [actor.name for actor in actors_for(parse_config(config), "train")]


def test_a_job_has_one_learner_its_generators_and_its_hosts() -> None:
    assert names(generator={"count": 2}, env={"hosts": 1}) == [
        "learner",
        "generator-0",
        "generator-1",
        "environment-0",
    ]
    assert names(env={"hosts": 0, "num_val": 0}) == ["learner", "generator-0"]


def test_a_job_has_no_hosts_if_only_external_agents_play_its_game() -> None:
    outside = {"tasks": "external", "num_steps": 2}
    none, unvalidated = {"count": 0}, {"num_val": 0}
    assert names(training=outside, generator=none, env=unvalidated) == ["learner"]
    for more in ({"generator": none}, {"env": unvalidated}):
        assert "environment-0" in names(training=outside, **more)
    assert "environment-0" in names(generator=none, env=unvalidated)  # generators may come later


def test_an_evaluator_with_slots_is_there_where_it_is_asked_for_or_nobody_else_could_validate() -> (
    None
):
    def slots(kind: str = "train", **sections: dict[str, Any]) -> dict[str, int]:
        tree = {"model": {"path": "m"}, "env": {"game": "g"}, **sections}
        found = actors_for(parse_config(tree), kind)
        return {actor.name: actor.slots for actor in found if actor.role != "environment"}

    both = {"learner": 1, "generator-0": 1}
    assert slots(evaluation={"slots": 2}) == {**both, "evaluator-0": 2}
    assert slots(env={"game": "g", "num_val": 0}, evaluation={"slots": 2}) == both
    wide = {"count": 0, "slots": 4}
    assert slots(generator=wide) == {"learner": 1, "evaluator-0": 4}
    assert slots("eval") == {"evaluator-0": 1}
    assert slots("eval", generator={"slots": 4}) == {"evaluator-0": 4}
    assert slots("eval", generator={"slots": 4}, evaluation={"slots": 2}) == {"evaluator-0": 2}


def test_the_generator_of_an_sft_job_has_slots_where_it_validates() -> None:
    def slots(**sections: dict[str, Any]) -> dict[str, int]:
        tree = {"model": {"path": "m"}, "sft": {"data": ["/d.jsonl"]}, **sections}
        found = actors_for(parse_config(tree), "sft")
        return {actor.name: actor.slots for actor in found if actor.role != "environment"}

    assert slots() == {"learner": 1, "generator-0": 0}
    assert slots(env={"game": "g"}) == {"learner": 1, "generator-0": 1}
    apart = slots(env={"game": "g"}, evaluation={"slots": 1})
    assert apart == {"learner": 1, "generator-0": 0, "evaluator-0": 1}


def test_the_generator_of_an_sft_job_may_share_the_learners_gpu_where_it_validates() -> None:
    def shares(**sections: Any) -> str:
        tree = {"model": {"path": "m"}, "sft": {"data": ["/d.jsonl"]}, **sections}
        found = actors_for(parse_config(tree), "sft")
        return next(actor.shares for actor in found if actor.role == "generator")

    assert shares(env={"game": "g"}) == "learner"
    assert shares(env={"game": "g"}, placement="separate") == ""
    assert shares(env={"game": "g"}, evaluation={"slots": 1}) == ""
    assert shares() == ""


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
