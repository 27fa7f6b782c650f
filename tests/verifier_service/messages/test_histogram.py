from __future__ import annotations

from outrider.verifier_service.messages.counts import Histogram


def test_a_value_counts_in_the_first_bucket_that_holds_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5, 100.0):
        histogram.observe(value)
    counts = histogram.counts()
    assert counts.bounds == (1.0, 2.0)
    assert counts.counts == (2, 1, 2), "an upper bound belongs to its bucket"
    assert counts.total == 105.5


def test_counts_of_one_moment_do_not_change():
    histogram = Histogram((1.0,))
    before = histogram.counts()
    histogram.observe(0.5)
    assert (before.counts, histogram.counts().counts) == ((0, 0), (1, 0))
