"""What changes the target's distribution and is not served: refused by name, with the reason."""

from __future__ import annotations

import re

from outrider.verifier_service.messages.draft import require
from outrider.verifier_service.messages.request import AcceptanceRule

_SPECULATIVE_PREFILL = (
    "speculative prefill is not served: it computes only the prompt tokens that a drafter finds important, so the "
    "output has another distribution, and the KV that it leaves in the prefix cache is wrong for every other request"
)
_JUDGES = (
    "lossy judges are not served: they accept tokens that the target would not have drawn, so the output has another "
    "distribution; the one lossy rule is typical, and its answers say is_lossy"
)
# by what other engines and papers call them
_REASONS = (
    (re.compile(r"spec(ulative)?[_-]?prefill"), _SPECULATIVE_PREFILL),
    (re.compile(r"judge|relaxed|lenien|accept_threshold|^fly$|^cactus$"), _JUDGES),
)


def refusal_of(name: str) -> str | None:
    """Return why what other engines call `name` is not served; None: it is none of these."""
    return next((reason for pattern, reason in _REASONS if pattern.search(name.lower())), None)


def acceptance_rule(name: str) -> AcceptanceRule:
    """Return the rule of a name; raises `ValueError` with the names that there are, and why a judge is none of them."""
    if name in list(AcceptanceRule):
        return AcceptanceRule(name)
    reason = refusal_of(name)
    raise ValueError(
        f"must be one of {', '.join(AcceptanceRule)}{'' if reason is None else f', not {name!r}: {reason}'}"
    )


def require_lossless(rule: AcceptanceRule) -> None:
    """Raise `ValueError` if a rule is lossy: in rollouts, a trainer's importance ratios would be biased."""
    expected = f"lossless in rollouts, which {rule} is not: a trainer takes tokens for draws from the target's law"
    require(not rule.is_lossy, "rejection_sample_method", expected)
