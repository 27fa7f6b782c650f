"""Begin rounds: tell drafters what they lack of requests, and ask for drafts.

Most rounds of most drafters are plain: the drafter knows the request, needs its tokens alone, and drafts a chain. Those
of one step and drafter are one message of columns, made in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.verifier_service.drafting.drafter_record import DrafterRecord, OutstandingRound, WantedDraft
from outrider.verifier_service.drafting.filing import Filing
from outrider.verifier_service.drafting.state_source import StateSource, unsent_states
from outrider.verifier_service.messages.draft import Commit, Commits, VerifierMessage
from outrider.verifier_service.messages.request import AcceptanceRule

Outbox = dict[str, list[VerifierMessage]]  # by drafter id


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Bounds on drafts and deadlines."""

    vocab_size: int
    max_model_len: int
    first_deadline_s: float = 1.0  # for a drafter that has not answered yet (it may be loading)
    max_deadline_s: float = 1.0
    max_tree_nodes: int = 0  # per draft; 0: only chains
    min_deadline_s: float = 0.02  # longer than a short stall, which else would lose every draft in flight
    # deadline of a session's first round (the drafter's prefill), during which the request runs without drafts: for
    # engines that cannot hold a single request. None: the request is held
    background_opening_s: float | None = None
    rollouts: bool = False  # responses are filed by prompt, not by `cache_salt`
    min_columns: int = 4  # plain rounds of a step and drafter from which columns take less time than single messages
    tells_texts: bool = False  # to pools that learn, once a request has ended: the engine has its states until `close`

    def __post_init__(self) -> None:
        if not 0 < self.min_deadline_s <= self.max_deadline_s:
            raise ValueError("min_deadline_s must be positive and at most max_deadline_s")


@dataclass(slots=True)
class Asking:
    """Begins rounds."""

    _drafters: Mapping[str, DrafterRecord]
    _filing: Filing
    _states: StateSource | None
    _config: CoordinatorConfig
    _num_rounds: int = 0

    def begin_all(self, wanted: Sequence[WantedDraft], now_s: float) -> Outbox:
        """Begin a step's rounds and hold their requests; return what drafters are to be told."""
        outbox: Outbox = {}
        plain: dict[str, tuple[float, list[WantedDraft]]] = {}  # by drafter, with the deadline of its rounds
        for one in wanted:
            request, session = one.request, one.session
            request.metrics.enabled = True
            drafter = self._drafters[session.drafter_id]
            if session.has_answered and drafter.is_plain and not (request.forced_ids or self._config.max_tree_nodes):
                if session.drafter_id not in plain:
                    plain[session.drafter_id] = now_s + drafter.timer.deadline_s, []
                request.hold_until_s, rows = plain[session.drafter_id]
                rows.append(one)
                continue
            opening_s = None if session.has_answered else self._config.background_opening_s
            until_s = None if opening_s is None else now_s + opening_s
            outbox.setdefault(session.drafter_id, []).extend(self.begin(one, now_s, until_s))
            if until_s is None:
                request.hold_until_s = now_s + drafter.timer_of(session).deadline_s
        for drafter_id, (_, rows) in plain.items():
            messages = outbox.setdefault(drafter_id, [])
            if len(rows) >= self._config.min_columns:
                messages.append(self._begin_plain(rows, now_s))
            else:
                messages += [message for one in rows for message in self.begin(one, now_s)]
        return outbox

    def _begin_plain(self, wanted: Sequence[WantedDraft], now_s: float) -> Commits:
        """Begin plain rounds of one drafter."""
        positions = [one.session.num_sent_tokens for one in wanted]
        tokens = [one.request.token_ids[start:] for one, start in zip(wanted, positions, strict=True)]
        first_id = self._num_rounds + 1
        self._num_rounds += len(wanted)
        for round_id, (request, session, length, _) in enumerate(wanted, first_id):
            session.num_sent_tokens = num_tokens = len(request.token_ids)
            session.round = OutstandingRound(round_id, num_tokens, length, 0, now_s)
        return Commits(
            request_ids=tuple([one.request.request_id for one in wanted]),
            round_ids=np.arange(first_id, first_id + len(wanted)),
            positions=np.array(positions, np.int64),
            counts=np.array([len(some) for some in tokens], np.int64),
            token_ids=np.array([token_id for some in tokens for token_id in some], np.int64),
            max_lengths=np.array([one.length for one in wanted], np.int64),
        )

    def begin(
        self, wanted: WantedDraft, now_s: float, background_until_s: float | None = None
    ) -> list[VerifierMessage]:
        """Begin a round: return the messages with the tokens and states that the drafter lacks, and the ask.

        `background_until_s`: the deadline of a round that no step waits for.
        """
        request, session, max_length, max_computed = wanted
        messages: list[VerifierMessage] = []
        if session.num_sent_tokens == 0:
            messages.append(self._filing.opening(request))
            session.num_sent_tokens, request.target_rows = request.num_tokens, []
        if max_computed != 0:  # what is found reads none, and the next ask brings them
            messages.extend(unsent_states(self._states, self._drafters[session.drafter_id].needs, request, session))
        self._num_rounds += 1
        # block verification judges chains: a sampled tree that happens to be one would pick the rule by its tokens
        is_tree = max_length > 1 and request.sampling.acceptance is not AcceptanceRule.BLOCK
        max_nodes = self._config.max_tree_nodes if is_tree else 0
        messages.append(
            Commit(
                request_id=request.request_id,
                round_id=self._num_rounds,
                position=session.num_sent_tokens,
                token_ids=tuple(request.token_ids[session.num_sent_tokens :]),
                max_length=max_length,
                max_nodes=max_nodes,
                max_computed=max_computed,
                predicted_ids=request.predicted_ids,
                forced_ids=request.forced_ids,
                target_rows=tuple(request.target_rows),
            )
        )
        session.num_sent_tokens, request.target_rows = request.num_tokens, []
        session.round = OutstandingRound(
            self._num_rounds, request.num_tokens, max_length, max_nodes, now_s, background_until_s, max_computed
        )
        return messages
