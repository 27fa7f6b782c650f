"""Loops are found where they are, and the penalty pushes against them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lab.embedded.unlikelihood import (
    CONTINUATION,
    LoopPenalty,
    completes_repeat,
    continue_greedily,
    unlikelihood,
)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def test_a_token_is_marked_when_it_ends_a_four_gram_seen_before():
    marks = completes_repeat(torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]))
    assert marks.nonzero().tolist() == [[0, 7]]


def test_the_penalty_is_minus_log_of_the_chance_not_to_repeat():
    logits = torch.log(torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]))  # [1, 2, vocab]
    penalty = unlikelihood(logits, torch.tensor([[0, 0]]), torch.tensor([[True, False]]))
    torch.testing.assert_close(penalty, -torch.log(torch.tensor(0.25)) / 2)


def test_training_on_the_penalty_makes_a_loop_unlikely():
    model, loop = tiny_model(), torch.arange(5).repeat(52)[None, :257]  # [1, 257]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def descend(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss_of_the_loop() -> float:
        return model(input_ids=loop, labels=loop).loss.item()

    for _ in range(40):
        descend(model(input_ids=loop, labels=loop).loss)
    taught, penalty = loss_of_the_loop(), LoopPenalty()
    assert completes_repeat(continue_greedily(model, loop[:, :64], CONTINUATION)).float().mean() > 0.9
    for _ in range(8):
        descend(penalty(model, loop))
    assert loss_of_the_loop() > taught + 1.0
