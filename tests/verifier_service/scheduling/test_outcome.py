import pytest

from fakes.engine_bench import make_request
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.outcome import Outcome, is_leaf
from outrider.verifier_service.scheduling.schedule import ScheduledRequest


def draft_of(num_tokens: int, parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(request_id="a", round_id=1, position=3, token_ids=tuple(range(num_tokens)), parents=parents)


def outcome(draft: Draft | None, path: tuple[int, ...], num_committed: int) -> Outcome:
    item = ScheduledRequest(request=Request.of(make_request(), 0.0), num_new_tokens=1, draft=draft, samples=True)
    return Outcome(
        item=item,
        first_row=10,
        committed=[0] * num_committed,
        path=path,
        follows_leaf=is_leaf(draft, path),
        finish_reason=None,
    )


@pytest.mark.parametrize(
    ("draft", "path", "num_committed", "num_judged"),
    [
        (None, (), 1, 0),
        (draft_of(3), (), 1, 1),
        (draft_of(3), (0, 1), 3, 3),
        (draft_of(3), (0, 1, 2), 4, 3),
        (draft_of(3), (0, 1), 2, 2),  # a stop token within the draft: what follows it was not judged
        (draft_of(3, (-1, -1, 1)), (1,), 2, 2),
        (draft_of(3, (-1, -1, 1)), (0,), 2, 1),  # nothing followed it
        (draft_of(3, (-1, -1, 1)), (1, 2), 3, 2),
    ],
)
def test_how_deep_a_draft_was_judged(draft, path, num_committed, num_judged):
    assert outcome(draft, path, num_committed).num_judged == num_judged


def test_rows_are_those_of_the_path():
    assert outcome(draft_of(3, (-1, -1, 1)), (1, 2), 3).rows == [10, 12, 13]
    assert outcome(draft_of(3, (-1, -1, 1)), (1, 2), 2).rows == [10, 12]
