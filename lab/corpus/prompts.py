"""Prompts of many kinds out of templates and words, each a function of the seed and its number alone.

The kinds are others than those of the prompts that figures are taken from (`lab/peers/prompts.jsonl`), so that no
figure speaks of what a drafter has learnt by heart.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
SECOND = re.compile(r"2$")  # {subject2} is another word of {subject}'s list


@dataclass(frozen=True, slots=True)
class TemplatedPrompt:
    """What a user says, and of which kind that is."""

    kind: str
    text: str


@cache
def kinds() -> Mapping[str, Sequence[str]]:
    """Return the templates of every kind of prompt."""
    templates: dict[str, list[str]] = json.loads((FOLDER / "kinds.json").read_text())
    return templates


@cache
def words() -> Mapping[str, Sequence[str]]:
    """Return what may stand in each place of a template."""
    lists: dict[str, list[str]] = json.loads((FOLDER / "words.json").read_text())
    return lists


def templated_prompt(number: int, seed: int) -> TemplatedPrompt:
    """Return one prompt; the kinds take turns."""
    names = list(kinds())
    kind = names[number % len(names)]
    draw = random.Random(f"{seed}/{number}")
    template = draw.choice(kinds()[kind])
    chosen: dict[str, str] = {}
    for place in re.findall(r"\{(\w+)\}", template):
        if place not in chosen:
            fresh = [word for word in words()[SECOND.sub("", place)] if word not in chosen.values()]
            chosen[place] = draw.choice(fresh)
    return TemplatedPrompt(kind, template.format(**chosen))
