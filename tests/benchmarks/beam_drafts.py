"""What drafts would save a beam search: how often look-ups name all tokens that the beams go on with, and the bound.

    python tests/benchmarks/beam_drafts.py MODEL [WIDTH ...]

One drafted round of a search is worth a step only if every beam that is kept was drafted: its row is then there. Our
chat prompts are searched without drafts, 64 tokens each; then each search is played again with the texts known so far:

    own        what followed the beam's last tokens earlier, in the prompt and in its own text
    siblings   the same, in the texts of all beams
    hindsight  any token that ever followed the last one, in the prompt or in any beam's text: no look-up by suffixes
               finds more

Each look-up names up to NUM_NAMED tokens, the last that followed the longest match first. *Saved* is the share of the
steps that are not taken, drafts being up to MAX_DEPTH tokens deep. *Bound*: speed ÷ without drafts, if only what is
right was drafted: a step of `n` beams with `k` drafted tokens each has n (k + 1) rows, by this machine's profile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

NUM_TOKENS, NUM_PROMPTS = 64, 16
NUM_NAMED, MAX_DEPTH, MAX_MATCH = 4, 4, 4

Texts = Sequence[Sequence[int]]  # of the live beams of a step, each with its prompt
LookUp = Callable[[Texts, Sequence[int]], set[int]]  # what may follow a beam, by what is known


def followers(texts: Texts, beam: Sequence[int], lengths: Iterable[int], most: int) -> set[int]:
    """Return up to `most` tokens that followed the beam's last tokens in `texts`, those of the first length before."""
    named: dict[int, None] = {}
    for length in lengths:
        tail = list(beam[-length:])
        for text in texts:
            for end in range(len(text) - 1, length - 1, -1):
                if list(text[end - length : end]) == tail:
                    named[text[end]] = None
                if len(named) == most:
                    return set(named)
    return set(named)


def siblings(texts: Texts, beam: Sequence[int]) -> set[int]:
    return followers(texts, beam, range(MAX_MATCH, 0, -1), NUM_NAMED)


def hindsight(texts: Texts, beam: Sequence[int]) -> set[int]:
    return followers(texts, beam, (1,), 1 << 30)


def num_saved(steps: Sequence[Texts], at: int, look_up: LookUp, *, are_alone: bool = False) -> int:
    """Return for how many steps behind `at` drafts of that step have all kept beams; `are_alone`: by its own text."""
    known = steps[at]
    for depth in range(1, min(MAX_DEPTH, len(steps) - 1 - at) + 1):
        for beam in steps[at + depth]:
            before, length = beam[:-1], len(known[0])
            texts = [text for text in known if list(text) == list(before[:length])] if are_alone else known
            if beam[-1] not in look_up(texts, before):
                return depth - 1
    return min(MAX_DEPTH, len(steps) - 1 - at)


def played(steps: Sequence[Texts], look_up: LookUp, *, are_alone: bool = False) -> list[int]:
    """Return of each step that is taken how many more it saves."""
    at, found = 0, []
    while at < len(steps) - 1:
        found.append(num_saved(steps, at, look_up, are_alone=are_alone))
        at += 1 + found[-1]
    return found


def bound(saved: Sequence[int], width: int, step_s: Callable[[int], float]) -> float:
    """Return the speed over that without drafts."""
    plain_s = (len(saved) + sum(saved)) * step_s(width)
    return plain_s / sum(step_s(width * (1 + more)) for more in saved)


def searched(llm: object, prompt: Sequence[int], width: int) -> list[Texts]:
    """Search without drafts; return the live beams after each step."""
    from outrider.cluster import BeamSearchParams
    from outrider.verifier_service.sampling import beam_search

    steps: list[Texts] = []
    advance = beam_search.Search.advance

    def noting(search: beam_search.Search, rows: object) -> None:
        advance(search, rows)
        steps.append([[*prompt, *beam.token_ids] for beam in search.live])

    beam_search.Search.advance = noting
    try:
        params = BeamSearchParams(beam_width=width, max_tokens=NUM_TOKENS)
        llm.beam_search([{"prompt_token_ids": list(prompt)}], params)
    finally:
        beam_search.Search.advance = advance
    return [live for live in steps if live]


def main(model: str, *widths: str) -> None:
    from outrider.cluster import LLM
    from outrider.lab.chat_prompts import encoded_prompts
    from outrider.verifier_service.engine.step_profile import measure_step_profile
    from outrider.verifier_service.pricing.cost_model import StepTimeModel

    llm = LLM(model, speculation="off", max_model_len=2048, threads_per_rank=1)
    profile = StepTimeModel.from_points(measure_step_profile(llm._engine.runner, 64).step_times)
    prompts = encoded_prompts(llm._engine.config.verifier_spec.model)[:NUM_PROMPTS]
    sys.stdout.write("| beams | look-up | steps | saved | bound |\n|---:|---|---:|---:|---:|\n")
    for width in map(int, widths or ("2", "4", "8")):
        searches = [searched(llm, prompt, width) for prompt in prompts]
        for name, look_up in (("own", siblings), ("siblings", siblings), ("hindsight", hindsight)):
            saved = [each for steps in searches for each in played(steps, look_up, are_alone=name == "own")]
            num_steps, speed = len(saved) + sum(saved), bound(saved, width, profile.t)
            sys.stdout.write(f"| {width} | {name} | {num_steps} | {sum(saved) / num_steps:.3f} | {speed:.3f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
