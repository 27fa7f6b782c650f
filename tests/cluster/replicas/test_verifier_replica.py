"""What a verifier's shell adds to what its engine says."""

from __future__ import annotations

from dataclasses import replace

from fakes.reports import IDLE
from outrider.cluster.replicas.verifier_replica import own_draft_length
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import DrafterCircuit


def test_a_drafter_in_the_engines_process_is_offered_for_as_long_as_it_is_up():
    other, own = (DrafterCircuit(drafter_id=name, state="closed") for name in ("d0", LOCAL_DRAFTER_ID))
    assert own_draft_length(replace(IDLE, circuits=(other, own)), 4) == 4
    assert own_draft_length(replace(IDLE, circuits=(other,)), 4) == 0, "it was lost: nobody should be sent to it"
