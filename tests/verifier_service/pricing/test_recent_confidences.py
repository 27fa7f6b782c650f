from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts
from outrider.verifier_service.pricing.recent_confidences import MAX_DRAFTERS, NUM_DRAFTS, RecentConfidences

GOOD, POOR = (0.9, 0.8), (0.3,)


def recent_of(*drafts: tuple[float, ...]) -> RecentConfidences:
    recent = RecentConfidences()
    for confidences in drafts:
        recent.observe("d", confidences)
    return recent


def test_of_a_drafter_unheard_of_nothing_is_known():
    assert recent_of(GOOD).next("another") is None


def test_all_drafts_are_seen_in_turn():
    recent = recent_of(GOOD, POOR)
    assert [recent.next("d") for _ in range(4)] == [GOOD, POOR, GOOD, POOR]


def test_the_last_drafts_of_the_last_drafters_are_remembered():
    recent = recent_of(GOOD, *[POOR] * NUM_DRAFTS)
    assert {recent.next("d") for _ in range(2 * NUM_DRAFTS)} == {POOR}
    for number in range(MAX_DRAFTERS - 1):
        recent.observe(str(number), GOOD)
    recent.observe("d", POOR)
    recent.observe("one more", GOOD)
    assert recent.next("0") is None
    assert recent.next("1") == GOOD
    assert recent.next("d") == POOR


def test_drafts_that_turn_bad_cost_little():
    """What is not asked for any more, since its request has seen some, is seen as those turn out that are."""
    found: list[float] = []
    for share_wrong, level_s, contention in ((0.5, 0.0, 0.0), (0.6, 0.0, 0.0), (0.4, 0.001, 0.2)):
        drafts = FarDrafts(level_s=level_s, fixed_s=0.004, opening_s=0.004, share_wrong=share_wrong, share_told=1.0)
        bench = FarBench(drafts, ONE_CORE, contention=contention)
        off = bench.speed(4, num_requests=8, draft_length=0, is_pinned=True)
        assert bench.speed(4, num_requests=64) > 1.02 * off
        drafts.share_wrong = 0.95
        found.append(bench.speed(4, num_requests=16) / off)
    assert sum(found) / len(found) > 0.94, "by history alone they leave 0.897 of 0.970"
