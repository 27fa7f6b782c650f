"""Conversations on disk come back as they were; a file that is none is named."""

import numpy as np
import pytest

from outrider.drafter_service.training.shards import Conversation, count_tokens, read_shard, write_shard

SAID = [Conversation((1, 2), (3,)), Conversation((65_535,), ()), Conversation((), (4, 5))]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.npz"
    write_shard(path, SAID)
    assert list(read_shard(path)) == SAID
    assert count_tokens(path) == 6
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path, largest, dtype):
    path = tmp_path / "a.npz"
    write_shard(path, [Conversation((largest,), (0,))])
    assert np.load(path)["token_ids"].dtype == dtype
    assert list(read_shard(path)) == [Conversation((largest,), (0,))]


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", numbers=np.zeros(3))
    lengths = {"prompt_lengths": np.array([1]), "answer_lengths": np.array([5])}
    np.savez(tmp_path / "short.npz", token_ids=np.zeros(3, dtype=np.uint16), **lengths)
    np.savez(tmp_path / "pickled.npz", token_ids=np.array([{}]), **lengths)
    for name in ("text", "other", "short", "pickled"):
        with pytest.raises(ValueError, match=f"{name}.npz: "):
            list(read_shard(tmp_path / f"{name}.npz"))
