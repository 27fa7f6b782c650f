from __future__ import annotations

from outrider.drafter_service.observing.stable_share import is_in_share

IDS = [f"request-{index}" for index in range(4000)]


def chosen(share: float, purpose: str = "sample") -> set[str]:
    return {each for each in IDS if is_in_share(each, share, purpose=purpose)}


def test_a_share_is_a_share_and_smaller_ones_are_within():
    assert chosen(0.0) == set()
    assert chosen(1.0) == set(IDS)
    assert 0.22 < len(chosen(0.25)) / len(IDS) < 0.28
    assert chosen(0.1) < chosen(0.25)


def test_the_choice_is_the_same_everywhere():
    assert [each for each in IDS[:8] if is_in_share(each, 0.5, purpose="sample")] == [
        "request-0",
        "request-2",
        "request-3",
    ]


def test_choices_for_different_purposes_are_independent():
    both = chosen(0.5) & chosen(0.5, "shadow")
    assert 0.22 < len(both) / len(IDS) < 0.28
