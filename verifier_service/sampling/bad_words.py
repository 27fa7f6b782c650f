"""Which tokens would complete a sequence that the output must not have, as vLLM's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence


class BadWords:
    """The last token of a sequence is barred wherever the output ends with the tokens before it."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        assert sequences
        assert all(sequences)
        self.last_ids = tuple(dict.fromkeys(sequence[-1] for sequence in sequences))
        self._always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self._begun: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # (begin, last token), by the begin's last token
        for *begin, last in sequences:
            if begin:
                self._begun.setdefault(begin[-1], []).append((tuple(begin), last))
        self._num_seen = max(1, *(len(sequence) - 1 for sequence in sequences))

    def barred(
        self, token_ids: Sequence[int], num_prompt_tokens: int, draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> list[list[int]]:
        """Return the ids that must not follow the tokens so far, and each draft token: a list for each row.

        `parents` as in `Draft`. A word begins in the output: the prompt's tokens do not count.
        """
        first = max(num_prompt_tokens, len(token_ids) - self._num_seen)
        ends = [tuple(token_ids[first:])]  # of the output before each row
        for id_, parent in zip(draft_token_ids, parents, strict=True):
            ends.append((*ends[parent + 1], id_)[-self._num_seen :])  # ROOT's row is the first
        return [self._completing(end) for end in ends]

    def _completing(self, end: tuple[int, ...]) -> list[int]:
        begun = self._begun.get(end[-1], ()) if end else ()
        return [*self._always, *(last for begin, last in begun if end[-len(begin) :] == begin)]
