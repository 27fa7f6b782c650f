"""What a played service is told to say."""

from __future__ import annotations

import pytest

from outrider.lab.gateway.played_service import UNREADABLE, asked, played_config, played_spec, scripted, whole_tokens
from outrider.lab.gateway.played_spec import MAX_MODEL_LEN, OnTime
from outrider.verifier_service.model.tokenizer import load_tokenizer


class Letters:
    """A tokenizer of letters, some of which have no text of their own."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return {"x": UNREADABLE, "_": ""}.get(chr(token_ids[0]), chr(token_ids[0]))


def test_every_token_that_is_said_has_a_text_of_its_own() -> None:
    assert whole_tokens(Letters(), "ax_ b") == (ord("a"), ord("b"))
    with pytest.raises(ValueError, match="model"):
        whole_tokens(Letters(), "x_")


def test_a_script_is_the_tokens_of_texts() -> None:
    assert scripted(Letters(), ("ab", "c")).sequences == ((97, 98), (99,))
    assert asked(Letters(), {"who": "ab", "": "c"}).replies == (("who", (97, 98)), ("", (99,)))


def test_the_service_has_no_drafts_and_says_the_embedded_tokenizers_words() -> None:
    config = played_config(model=None, max_num_seqs=1024)
    spec = played_spec(config, step_s=0.006)
    assert not config.pools
    assert config.own_drafter is None
    assert (config.port, spec.step_s, spec.verifier.max_num_seqs) != (config.grpc_port, 0.0, 256)
    assert spec.max_model_len == MAX_MODEL_LEN == 131_072
    assert isinstance(spec.says, OnTime)
    tokenizer = load_tokenizer(spec.verifier.model)
    assert all(tokenizer.decode([token_id]).strip() for token_id in spec.says.token_ids)
    assert len(spec.says.token_ids) > 10
