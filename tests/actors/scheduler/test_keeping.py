"""Which jobs that have ended are archived by themselves."""

from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.scheduler.jobs.view import RetentionLimits, beyond

ENDED = {"ann": {"a1": 1.0, "a2": 2.0, "a3": 3.0}, "bob": {"b1": 0.5}, "cyd": {}}


def test_the_oldest_of_who_has_more_than_a_user_may_have_go_first() -> None:
    assert list(beyond(ENDED, RetentionLimits(of_user=3, of_all=10))) == []
    assert list(beyond(ENDED, RetentionLimits(of_user=2, of_all=10))) == ["a1"]
    assert list(beyond(ENDED, RetentionLimits(of_user=0, of_all=10))) == ["a1", "a2", "b1", "a3"]


def test_of_a_crowded_pool_whoever_has_the_most_gives_up_the_oldest() -> None:
    assert list(beyond(ENDED, RetentionLimits(of_user=10, of_all=3))) == ["a1"]
    assert list(beyond(ENDED, RetentionLimits(of_user=10, of_all=2))) == ["a1", "a2"]


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.dictionaries(st.text("xyz", min_size=1), st.floats(0, 9))
    ),
    st.integers(0, 6),
    st.integers(0, 12),
)
def test_what_is_left_is_within_both_bounds_and_newer_than_what_went(
    of_user: dict[str, dict[str, float]], most: int, most_of_all: int
) -> None:
    ended = {
        user: {f"{user}.{key}": at for key, at in jobs.items()} for user, jobs in of_user.items()
    }
    gone = set(beyond(ended, RetentionLimits(most, most_of_all)))
    left = {user: set(jobs) - gone for user, jobs in ended.items()}
    assert all(len(jobs) <= most for jobs in left.values())
    assert sum(map(len, left.values())) <= most_of_all
    for user, jobs in ended.items():
        went = [jobs[key] for key in jobs if key in gone]
        assert not went or not left[user] or max(went) <= min(jobs[key] for key in left[user])
    full = [user for user, jobs in ended.items() if len(jobs) > most]
    assert gone == set() or full or sum(map(len, ended.values())) > most_of_all
