"""A drafter that is often right, in chains and in trees, for tests that know the output beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from exactness.small_engines import RandomDrafts
from outrider.verifier_service.messages.draft import ROOT, Commit, Draft
from tiny.models import VOCAB_SIZE


class Hints(RandomDrafts):
    """A drafter that is shown the outputs beforehand and is often right; trees where it is asked for them."""

    def __init__(self, expected: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(VOCAB_SIZE + 40)
        self._expected = expected  # by the prompt
        self._prompts: dict[str, int] = {}
        self._tokens: dict[str, tuple[int, ...]] = {}
        self.num_trees = 0

    def send(self, drafter_id: str, messages: Sequence[object]) -> None:
        for message in messages:
            if hasattr(message, "sampling"):
                self._tokens[message.request_id] = message.token_ids
        super().send(drafter_id, messages)

    def _draft(self, commit: Commit) -> Draft:
        plain = super()._draft(commit)
        tokens = self._tokens[commit.request_id] = self._tokens[commit.request_id] + commit.token_ids
        rest = self._rest(tokens)
        assert list(commit.forced_ids) == rest[: len(commit.forced_ids)], "forced, and yet something else"
        if commit.max_nodes == 0:
            hinted = (
                right if self._rng.random() < 0.7 else wrong
                for right, wrong in zip(rest, plain.token_ids, strict=False)
            )
            return replace(plain, token_ids=tuple(hinted))
        return self._tree(plain, rest, commit)

    def _rest(self, tokens: tuple[int, ...]) -> Sequence[int]:
        """Return what comes after prompt and output."""
        return next(
            output[len(tokens) - len(prompt) :]
            for prompt, output in self._expected.items()
            if tokens[: len(prompt)] == prompt
        )

    def _tree(self, plain: Draft, rest: Sequence[int], commit: Commit) -> Draft:
        """Grow a random tree around the right path, as far as there is one."""
        token_ids, parents, depths, right = [], [], [], ROOT
        for node in range(commit.max_nodes):
            depth = 0 if right == ROOT else depths[right] + 1
            if depth < min(commit.max_length, len(rest)) and self._rng.random() < 0.4:
                parent, token_id, depth = right, rest[depth], depth
                right = node
            else:
                parent = self._rng.randrange(ROOT, node)
                depth = 0 if parent == ROOT else depths[parent] + 1
                token_id = self._rng.randrange(self._vocab_size)
            if depth >= commit.max_length or (parent, token_id) in zip(parents, token_ids, strict=True):
                break
            token_ids.append(token_id)
            parents.append(parent)
            depths.append(depth)
        self.num_trees += bool(token_ids)
        return replace(plain, token_ids=tuple(token_ids), parents=tuple(parents))
