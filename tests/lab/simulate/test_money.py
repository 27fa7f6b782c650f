"""What tokens cost, by hand: bills, shares and the price at which a rival draws level."""

from __future__ import annotations

import pytest

from outrider.lab.simulate.money import Bill, Worth, break_even_ratio, prices_with

BILL = Bill(num_verifier_devices=16, num_drafter_devices=4, verifier_price=3.0, drafter_price=0.5)


def test_tokens_are_shared_out_three_ways() -> None:
    worth = Worth.of(8000.0, BILL)
    assert (worth.per_verifier_device, worth.per_device, worth.per_price) == (500.0, 400.0, 160.0)


def test_a_rival_draws_level_at_the_break_even_ratio() -> None:
    # 8,000 tokens/s are what 20 of the rival's devices give, 16 are paid: 4 drafters may cost 4 of them, 1 each
    assert break_even_ratio(8000.0, BILL, 400.0) == 1.0
    for ratio, pays in ((0.9, True), (1.1, False)):
        dearer = Bill(num_verifier_devices=16, num_drafter_devices=4, verifier_price=3.0, drafter_price=3.0 * ratio)
        rival = Worth.of(
            400.0 * 16, Bill(num_verifier_devices=16, num_drafter_devices=0, verifier_price=3.0, drafter_price=3.0)
        )
        assert (Worth.of(8000.0, dearer).per_price > rival.per_price) is pays


@pytest.mark.parametrize("change", ["H100", "H100=", "H100=free", "H100=0", "H100=-1", "H100=inf", "TPU=1"])
def test_a_price_that_is_none_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match="price_per_hour"):
        prices_with((change,))
