"""The points of a sweep: combinations, or drawn ones that are the same each time."""

import pytest
from tinkermq.clients.cli.sweep import NumberRange, list_points, parse_space
from tinkermq.schemas.wire.errors import ConfigError


def test_keys_with_several_values_or_a_range_vary_and_the_others_do_not() -> None:
    same, space = parse_space(
        ["a.b=1", "learner.lr=1e-5, 3e-5", "seed=1..9", "tags=[x,y]", "k={a: 1, b: 2},{a: 3}"]
    )
    assert same == ["a.b=1", "tags=[x,y]"]
    assert space == {
        "learner.lr": ["1e-5", "3e-5"],
        "seed": NumberRange(1, 9, whole=True),
        "k": ["{a: 1, b: 2}", "{a: 3}"],
    }


def test_a_grid_is_every_combination() -> None:
    _, space = parse_space(["a=1,2", "b=x,y,z"])
    grid = list_points(space, None, 0)
    assert len(grid) == 6
    assert grid[0] == {"a": "1", "b": "x"}
    assert len({tuple(sorted(point.items())) for point in grid}) == 6


def test_drawn_points_are_the_same_each_time_and_within_their_ranges() -> None:
    _, space = parse_space(["lr=1e-6..1e-4", "n=2..8", "x=a,b"])
    drawn = list_points(space, 200, seed=3)
    assert drawn == list_points(space, 200, seed=3)
    assert drawn[:50] == list_points(space, 50, seed=3)  # more of them begin with the same
    assert drawn != list_points(space, 200, seed=4)
    rates = sorted(float(point["lr"]) for point in drawn)
    assert 1e-6 <= rates[0] < 3e-6
    assert 3e-5 < rates[-1] <= 1e-4
    assert rates[100] == pytest.approx(1e-5, rel=0.5)  # the middle of the logarithms
    assert {point["n"] for point in drawn} == {str(n) for n in range(2, 9)}


@pytest.mark.parametrize(
    ("overrides", "runs", "said"),
    [
        (["a=1"], None, "nothing varies"),
        (["a=1..2"], None, "a is a range: of how many runs"),
        (["a=2..1"], 3, "ends before it begins"),
        (["a=1..2"], 1001, "a sweep of 1,001 runs"),
        (["a=" + ",".join("12345678"), "b=" + ",".join("x" * 200)], None, "a sweep of 1,600 runs"),
    ],
)
def test_what_cannot_be_swept_is_refused(overrides: list[str], runs: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list_points(parse_space(overrides)[1], runs, 0)
