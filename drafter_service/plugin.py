"""What a drafter in a package of its own is made of: the names that it imports, and what it promises.

The package has an entry point of the group `outrider.drafters`, a function of one `PluginContext` that returns a
`Drafter`; `{"method": NAME, "plugin_config": {...}}` asks for it, in a pool or in the verifier (`location`).

- `draft` answers each `Ask` once, by `ask.answer(token_ids)`, without tokens where it has no guess, in this call or
  in a later one, to which the ask is passed again; 1,000 calls in a row without an answer count as a failure. A draft
  is a chain of at most `length` tokens; only where `max_nodes` is not 0 it may be a tree of so many (`parents`). What
  breaks these bounds the verifier drops and counts. `max_num_tokens` bounds one forward of a model: who has none may
  ignore it.
- `forced_ids` are the only tokens that the request's grammar allows next: a draft that begins otherwise is rejected
  there. `predicted_ids` are the target's likeliest tokens after the draft that was verified last, where `needs` asks.
- A draft without `draft_probs` is a point mass, however it was found: the tokens keep the target's law. With them, each
  token must have been drawn from its row, whose integer weights sum to `DRAFT_PROB_SCALE`, and the draft has all
  `length` tokens or none, or sampled requests get another law. Greedy and seeded requests need none.
- `confidences`, where it has them, depend on what precedes a token, never on what was drawn after it.
- A session is an `Ask.key`. Its `token_ids` only grow, and are to be read only; after `release`, or where the verifier
  says everything again, they begin anew. Everything kept for a session can be lost at any time. `check_integrity` is
  for tests: it raises where something is kept of a session that is not among `keys`.
- All calls come from one thread. It knows tokens alone: `needs` may ask for `predictions`, never for `taps`.
- What it raises ends it: in a pool its process is replaced, in a verifier nothing is drafted until that starts again.
  Either way requests go on without drafts, and no token is lost.

A name that one of our methods has, too, is asked for as `{"method": "plugin", "plugin": NAME}`. A hybrid may have one
plug-in among its `methods`.

See examples/drafter_plugin for a whole one.
"""

from __future__ import annotations

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.service.plugins import PluginContext
from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Draft,
    DraftNeeds,
    DraftSampling,
    SparseRow,
)

__all__ = [
    "DRAFT_PROB_SCALE",
    "ROOT",
    "Ask",
    "Draft",
    "DraftNeeds",
    "DraftSampling",
    "Drafter",
    "PluginContext",
    "SessionKey",
    "SparseRow",
]
