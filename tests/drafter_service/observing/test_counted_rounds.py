"""Counts of answered rounds, by hand and against a count of whole conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafter_service.engine.draft_tree import num_named, num_reached
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.learning_messages import SetLearning, VersionCounts
from outrider.drafter_service.observing.counted_rounds import MAX_WAITING_ROUNDS
from outrider.drafter_service.observing.engine_learning import EngineLearning
from outrider.verifier_service.messages.draft import ROOT, Close, Draft, Resync
from tiny.scripted_drafter import ScriptedDrafter, commit, open_, say, scripted_engine


def draft_of(token_ids: tuple[int, ...], parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(request_id="r", round_id=1, position=0, token_ids=token_ids, parents=parents)


def learning_engine(drafter: ScriptedDrafter | None = None) -> tuple[DraftEngine, EngineLearning]:
    engine = scripted_engine(drafter or ScriptedDrafter())
    learning = EngineLearning(engine, lambda folder: ScriptedDrafter())
    learning.set(SetLearning(call_id="s", sample_share=1.0))
    return engine, learning


def test_a_chain_is_right_up_to_its_first_wrong_token():
    assert num_named(draft_of((1, 2, 3)), (1, 2, 9)) == 2
    assert num_named(draft_of((1, 2, 3)), (9, 2, 3)) == 0
    assert num_named(draft_of((1, 2, 3)), (1, 2)) == 2
    assert num_named(draft_of(()), (1, 2)) == 0
    assert num_reached(draft_of((1, 2, 3)), 2) == 2


def test_a_tree_counts_by_its_best_path():
    tree = draft_of((1, 5, 2, 6, 3), (ROOT, ROOT, 0, 1, 2))
    assert num_named(tree, (1, 2, 3, 4)) == 3
    assert num_named(tree, (5, 6, 3)) == 2
    assert num_named(tree, (5, 2, 3)) == 1, "the right token below a wrong parent is no guess of it"
    assert num_named(tree, (7,)) == 0
    assert [num_reached(tree, count) for count in range(5)] == [0, 2, 4, 5, 5]


def test_a_round_waits_until_all_of_its_places_have_come():
    engine, learning = learning_engine()
    say(engine, open_("r", (1, 2, 3)), commit("r", 3))  # drafts 4 5 6 7
    say(engine, commit("r", 3, (4, 5), max_length=0))
    assert learning.report().versions == (VersionCounts(version="v0"),)
    say(engine, commit("r", 5, (6, 9), max_length=0))
    counts = VersionCounts(version="v0", num_rounds=1, num_draft_tokens=4, num_named_tokens=3)
    assert learning.report().versions == (counts,)


def test_the_end_of_a_session_ends_its_rounds_and_a_round_without_text_is_none():
    engine, learning = learning_engine()
    say(engine, open_("r", (1, 2, 3)), commit("r", 3))
    say(engine, commit("r", 3, (4,)))  # drafts 5 6 7 8, which nothing follows
    say(engine, Close(request_id="r"))
    counts = VersionCounts(version="v0", num_rounds=1, num_draft_tokens=1, num_named_tokens=1)
    assert learning.report().versions == (counts,)


def test_a_round_counts_for_the_version_that_answered_it_and_four_versions_are_kept():
    engine, learning = learning_engine()
    say(engine, open_("r", (1, 2, 3)), commit("r", 3))
    engine.take_version("v1")
    say(engine, commit("r", 3, (4, 5, 6, 7)))  # of v0; drafts 8 9 10 11
    say(engine, commit("r", 7, (8, 9, 0, 0), max_length=0))
    assert [(each.version, each.num_named_tokens) for each in learning.report().versions] == [("v0", 4), ("v1", 2)]
    for version in ("v2", "v3", "v4"):
        engine.take_version(version)
    assert [each.version for each in learning.report().versions] == ["v1", "v2", "v3", "v4"]
    engine.take_version("v1")
    assert learning.report().versions[-1] == VersionCounts(version="v1"), "since it took that version"
    assert [each.version for each in learning.report().versions] == ["v2", "v3", "v4", "v1"]


def test_nothing_is_counted_before_a_learner_asks_and_after_it_has_stopped():
    engine = scripted_engine(ScriptedDrafter())
    learning = EngineLearning(engine, lambda folder: ScriptedDrafter())
    assert (engine.observer, learning.report().versions) == (None, ())
    learning.set(SetLearning(call_id="s", shadow_version="v1", shadow_share=1.0))
    assert engine.observer is learning
    say(engine, open_("r", (1, 2, 3)), commit("r", 3))
    learning.set(SetLearning(call_id="s"))
    assert (engine.observer, learning.report().versions, learning.report().trial) == (None, (), None)
    say(engine, commit("r", 3, (4, 5, 6, 7)), Close(request_id="r"))
    assert learning.take_samples() == ([], 0)


def test_a_session_that_asks_on_and_on_without_text_is_bounded():
    engine, learning = learning_engine()
    say(engine, open_("r", (1, 2, 3)))
    for _ in range(MAX_WAITING_ROUNDS + 5):
        say(engine, commit("r", 3))
    say(engine, commit("r", 3, (4, 5, 6, 7), max_length=0))
    assert learning.report().versions[0].num_rounds == MAX_WAITING_ROUNDS


# --- any conversation ---


@dataclass
class Counted:
    """A slow count: every answer with the text of its session, as it was said."""

    texts: list[list[int]] = field(default_factory=list)  # of sessions, whatever ended them
    answers: list[tuple[int, int, int, Draft]] = field(default_factory=list)  # session, position, length, draft
    session: int | None = None

    def counts(self, is_over: bool) -> tuple[int, int, int]:
        num_rounds = num_tokens = num_right = 0
        for session, position, length, draft in self.answers:
            text = self.texts[session][position : position + length]
            is_settled = len(text) == length or is_over or session != self.session
            if not text or not is_settled:
                continue
            paths: dict[int, list[int]] = {ROOT: []}
            for index, token_id in enumerate(draft.token_ids):
                parent = index - 1 if draft.parents is None else draft.parents[index]
                paths[index] = [*paths[parent], token_id]
            del paths[ROOT]
            num_rounds += 1
            num_tokens += sum(len(path) <= len(text) for path in paths.values())
            num_right += max((len(path) for path in paths.values() if text[: len(path)] == path), default=0)
        return num_rounds, num_tokens, num_right


TOKENS = st.lists(st.integers(0, 2), max_size=5)
OPEN = st.tuples(st.just("open"), st.lists(st.integers(0, 2), min_size=1, max_size=4))
COMMIT = st.tuples(st.just("commit"), TOKENS, st.integers(0, 5), st.booleans())
SUPERSEDED = st.tuples(st.just("superseded"), TOKENS, TOKENS)
ENDS = st.sampled_from([("gap",), ("close",), ("gone",)])
SESSIONS = st.lists(st.tuples(OPEN, st.lists(COMMIT | COMMIT | SUPERSEDED, max_size=8), ENDS | OPEN), max_size=5)


@settings(max_examples=150)
@given(SESSIONS, st.integers(0, 1 << 32))
def test_any_conversation_is_counted_right(sessions, seed):
    random = Random(seed)

    def guess(ask: Ask) -> Draft:
        if not ask.max_nodes:
            return ask.answer(tuple(random.choices(range(3), k=random.randint(0, ask.length))))
        nodes: list[tuple[int, int]] = []
        depths = {ROOT: -1}
        for _ in range(ask.max_nodes):
            parent = random.choice([node for node, depth in depths.items() if depth + 1 < ask.length])
            if (parent, token_id := random.randrange(3)) not in nodes:
                depths[len(nodes)] = depths[parent] + 1
                nodes.append((parent, token_id))
        return ask.answer(tuple(token for _, token in nodes), parents=tuple(parent for parent, _ in nodes))

    engine, learning = learning_engine(ScriptedDrafter(guess))
    counted = Counted()

    def ask(tokens: list[int], length: int, is_tree: bool) -> None:
        text = counted.texts[counted.session]
        text += tokens
        said = say(engine, commit("r", len(text) - len(tokens), tokens, max_length=length, max_nodes=6 * is_tree))
        counted.answers += [(counted.session, len(text), length, draft) for draft in said]

    for kind, *values in [step for begin, middle, end in sessions for step in (begin, *middle, end)]:
        if kind == "open":
            say(engine, open_("r", values[0]))
            counted.session = len(counted.texts)
            counted.texts.append(list(values[0]))
        elif counted.session is None:
            assert all(isinstance(message, Resync) for message in say(engine, commit("r", 3)))
        elif kind == "commit":
            ask(*values)
        elif kind == "superseded":
            text = counted.texts[counted.session]
            engine.handle("v", commit("r", len(text), values[0]))
            text += values[0]
            ask(values[1], 2, False)
        else:
            if kind == "gap":
                assert say(engine, commit("r", 99)) == [Resync(request_id="r")]
            elif kind == "close":
                say(engine, Close(request_id="r"))
            else:
                engine.forget_peer("v")
            counted.session = None
        (counts,) = learning.report().versions
        found = (counts.num_rounds, counts.num_draft_tokens, counts.num_named_tokens)
        assert found == counted.counts(is_over=False)
    engine.forget_peer("v")
    (counts,) = learning.report().versions
    assert (counts.num_rounds, counts.num_draft_tokens, counts.num_named_tokens) == counted.counts(is_over=True)
    engine.check_integrity()
