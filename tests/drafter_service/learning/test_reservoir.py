"""Bounds, partitions, what is held out, and rewards."""

import math
import random

import pytest

from outrider.drafter_service.learning import reservoir as module
from outrider.drafter_service.learning.reservoir import HELD_OUT_EVERY, Reservoir, reward_weights
from tiny.served import sample


def of_size(num_bytes, request_id, salt=""):
    return sample(request_id, range(num_bytes // 4), cache_salt=salt)


def ids(kept):
    return [each.sample.request_id for each in kept]


def everything(reservoir):
    return {*ids(reservoir.training()), *ids(reservoir.held_out())}


def test_the_oldest_goes_when_it_is_full():
    reservoir = Reservoir(100)
    for number in range(7):
        reservoir.add(of_size(20, str(number)))
        reservoir.check_integrity()
    assert everything(reservoir) == {"2", "3", "4", "5", "6"}
    assert (reservoir.num_bytes, reservoir.num_seen, len(reservoir)) == (100, 7, 5)


def test_no_tenant_crowds_out_another():
    reservoir = Reservoir(100)
    reservoir.add(of_size(20, "quiet", "b"))
    for number in range(50):
        reservoir.add(of_size(20, str(number), "a"))
        reservoir.check_integrity()
    assert everything(reservoir) == {"quiet", "46", "47", "48", "49"}


def test_what_is_larger_than_everything_is_refused():
    reservoir = Reservoir(100)
    reservoir.add(of_size(20, "small"))
    reservoir.add(of_size(104, "large"))
    assert (everything(reservoir), reservoir.num_refused) == ({"small"}, 1)


def test_bytes_of_states_and_rows_are_counted():
    reservoir = Reservoir(1000)
    states, rows = bytes(2 * 8 * 2), bytes(4 * 3 * 2)
    reservoir.add(
        sample(states=states, state_width=8, state_positions=(0, 2), num_top=2, top_ids=rows, top_weights=rows)
    )
    assert reservoir.num_bytes == 4 * (4 + 2) + 32 + 24 + 24


def test_one_in_some_arrivals_of_each_partition_is_never_trained_on():
    reservoir = Reservoir(1 << 20)
    for number in range(4 * HELD_OUT_EVERY):
        for salt in ("", "a"):
            reservoir.add(sample(f"{salt}{number}", cache_salt=salt))
    assert (len(reservoir.held_out()), len(reservoir.training())) == (8, 8 * (HELD_OUT_EVERY - 1))
    assert {each.sample.cache_salt for each in reservoir.held_out()} == {"", "a"}
    assert not set(ids(reservoir.held_out())) & set(ids(reservoir.training()))


def test_the_same_request_replaces_and_stays_held_out():
    reservoir = Reservoir(1 << 20)
    for number in range(HELD_OUT_EVERY):
        reservoir.add(sample(str(number)))
    held = ids(reservoir.held_out())
    for number in range(HELD_OUT_EVERY):
        reservoir.add(sample(str(number), (1, 2, 3)))
        reservoir.check_integrity()
    assert ids(reservoir.held_out()) == held == [str(HELD_OUT_EVERY - 1)]
    assert len(reservoir) == HELD_OUT_EVERY
    assert all(len(each.token_ids) == 3 for each in reservoir.training())


@pytest.mark.parametrize(
    "fields",
    [
        {"num_prompt_tokens": 5},
        {"states": b"\0" * 6, "state_width": 2, "state_positions": (0, 1)},
        {"states": b"\0" * 8, "state_width": 2, "state_positions": (1, 1)},
        {"states": b"\0" * 8, "state_width": 2, "state_positions": (1, 4)},
        {"num_top": 2, "top_ids": b"\0" * 24, "top_weights": b"\0" * 20},
    ],
)
def test_what_does_not_fit_together_is_refused(fields):
    reservoir = Reservoir(1 << 20)
    reservoir.add(sample(**fields))
    reservoir.check_integrity()
    assert (len(reservoir), reservoir.num_refused, reservoir.num_seen) == (0, 1, 1)


def test_the_newest_weights_come_first_if_there_are_enough_of_their_samples():
    reservoir = Reservoir(1 << 20)
    for number in range(6):
        reservoir.add(sample(str(number), weight_version="old" if number < 4 else "new"))
    assert len(reservoir.training(min_samples=3)) == 6
    assert ids(reservoir.training(min_samples=2)) == ["4", "5"]


def test_texts_are_the_newest_oldest_first_and_without_states():
    reservoir = Reservoir(1 << 20)
    for number in range(5):
        reservoir.add(sample(str(number), states=bytes(4), state_width=1, state_positions=(0, 1)))
    assert reservoir.texts(9) == (sample("3"), sample("4"))
    assert reservoir.texts(0) == ()


def test_rewards_come_before_or_after_their_samples(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_REWARDS", 2)
    reservoir = Reservoir(1 << 20)
    for request_id, reward in (("forgotten", 9.0), ("early", 1.0), ("never", 5.0)):
        reservoir.reward(request_id, reward)
    for request_id in ("early", "late", "none", "forgotten"):
        reservoir.add(sample(request_id))
    reservoir.reward("late", 3.0)
    reservoir.check_integrity()
    assert [each.reward for each in reservoir.training()] == [1.0, 3.0, None, None]
    with pytest.raises(ValueError, match="not finite"):
        reservoir.reward("late", math.nan)


def test_a_request_of_the_same_name_in_another_partition_replaces_no_sample():
    reservoir = Reservoir(1 << 20)
    for salt in ("a", "b", "a"):
        reservoir.add(sample("one name", cache_salt=salt))
        reservoir.check_integrity()
    assert [each.sample.cache_salt for each in reservoir.training()] == ["b", "a"]
    reservoir.reward("one name", 2.0)
    assert [each.reward for each in reservoir.training()] == [2.0, 2.0]


def test_reward_weights_by_hand():
    reservoir = Reservoir(1 << 20)
    for number, reward in enumerate((1.0, 3.0, None)):
        reservoir.add(sample(str(number)))
        if reward is not None:
            reservoir.reward(str(number), reward)
    assert reward_weights(reservoir.training()) == pytest.approx([math.exp(-1), math.exp(1), 1.0])
    for number in range(10, 14):
        reservoir.add(sample(str(number)))
        reservoir.reward(str(number), 1.0)
    reservoir.reward("1", 1000.0)
    weights = reward_weights(reservoir.training())
    assert weights[1] == pytest.approx(min(10.0, math.exp(math.sqrt(5))))
    assert min(weights) >= 0.1
    assert reward_weights(reservoir.training()[3:5]) == [1.0, 1.0], "equal rewards say nothing"
    assert reward_weights([]) == []


def test_books_hold_under_random_traffic():
    rng, reservoir = random.Random(0), Reservoir(2000)
    for _ in range(500):
        size, salt = 4 * rng.randrange(1, 60), rng.choice("abc")
        reservoir.add(of_size(size, str(rng.randrange(40)), salt))
        reservoir.reward(str(rng.randrange(60)), rng.random())
        reservoir.check_integrity()
