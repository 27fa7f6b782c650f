"""What the demo asks: chat questions of a model that chats, of another one beginnings of texts to go on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.config.known_models import is_embedded
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.drafter_service.embedded import held_out_prompts

HTTP_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the larger of two numbers.",
    "Name three things one needs to bake bread, and say what each is for.",
)
GRPC_QUESTIONS = (
    "Why is the sky blue? Answer in two sentences.",
    "List the days of the week, one a line.",
)
FILE = """def read_prices(path):
    prices = {}
    for line in open(path):
        name, price = line.split(",")
        prices[name.strip()] = float(price)
    return prices


def total(prices, basket):
    amount = 0.0
    for name, count in basket.items():
        amount += prices[name] * count
    return round(amount, 2)
"""
EDITS = ("Repeat this text exactly:", "Repeat this text, with the first line changed:")
LONG_QUESTION = "Tell the story of a lighthouse keeper who finds a message in a bottle."
_BURST_FORMS = (
    *("What is {}?", "Why do people like {}?", "Write a short poem about {}.", "Explain {} to a child."),
    *(
        "List five facts about {}.",
        "Who works with {}, and how?",
        "How did {} change over time?",
        "Compare {} with music.",
    ),
    *("What would the world be without {}?", "Write a letter to a friend about {}.", "What is hard about {}?"),
    *("Give me advice about {}.", "Describe {} in one sentence.", "Ask me three questions about {}."),
    *("What do children learn from {}?", "What is the best book about {}?"),
)
_BURST_TOPICS = (
    *("the sea", "bread", "mathematics", "gardening", "trains", "winter", "football", "the moon"),
    *("painting", "bicycles", "bridges", "bees", "chess", "tea", "mountains", "sleep"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question, as people, the HTTP endpoint and gRPC read it."""

    shown: str
    path: str  # of the endpoint
    fields: dict[str, Any]  # of its body
    token_ids: tuple[int, ...]  # the whole prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """All that the demo asks of one model."""

    over_http: tuple[Question, ...]
    over_grpc: tuple[Question, ...]
    edits: tuple[Question, ...]  # of a file, with the file as prediction; none of a model that does not chat
    long: Question  # whose answer is long enough to lose a drafter in
    burst: tuple[Question, ...]  # asked in turn, from the first on again at the end


def questions_for(model: str | None, codec: TextCodec) -> Questions:
    """Choose questions that a model can answer: the embedded one goes on with code."""
    if is_embedded(model) or not codec.has_chat_template:
        texts = [_completion(codec, prompt) for prompt in held_out_prompts()]
        by_http, by_grpc = tuple(texts[:3]), tuple(texts[3:5])
        return Questions(over_http=by_http, over_grpc=by_grpc, edits=(), long=texts[5], burst=tuple(texts))
    return Questions(
        over_http=_chats(codec, HTTP_QUESTIONS),
        over_grpc=_chats(codec, GRPC_QUESTIONS),
        edits=tuple(_chat(codec, f"{wish}\n\n{FILE}", wish, prediction=FILE) for wish in EDITS),
        long=_chat(codec, LONG_QUESTION),
        burst=_chats(codec, (form.format(topic) for topic in _BURST_TOPICS for form in _BURST_FORMS)),
    )


def in_turn(questions: Sequence[Question], start: int, number: int) -> list[Question]:
    """Return so many questions from one on, the same ones again where there are fewer."""
    return list(itertools.islice(itertools.cycle(questions), start, start + number))


def _chats(codec: TextCodec, questions: Iterable[str]) -> tuple[Question, ...]:
    return tuple(_chat(codec, question) for question in questions)


def _chat(codec: TextCodec, question: str, shown: str | None = None, *, prediction: str | None = None) -> Question:
    messages = [{"role": "user", "content": question}]
    predicted = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return Question(
        shown=shown or question,
        path="/v1/chat/completions",
        fields={"messages": messages, **predicted},
        token_ids=codec.encode_now(codec.render_chat_now(messages), add_special_tokens=False),
    )


def _completion(codec: TextCodec, prompt: str) -> Question:
    return Question(
        shown=prompt.strip().splitlines()[-1].strip(),
        path="/v1/completions",
        fields={"prompt": prompt},
        token_ids=codec.encode_now(prompt, add_special_tokens=True),
    )
