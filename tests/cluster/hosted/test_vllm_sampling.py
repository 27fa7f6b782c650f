from types import SimpleNamespace

import pytest
import torch

from outrider.cluster.hosted.vllm_sampling import expand_batch_to_tokens, mend_expansion


def unwritten(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    return torch.full((num_tokens,), 123, dtype=x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_token_has_its_requests_value(dtype):
    expanded = expand_batch_to_tokens(
        torch.tensor([7, 0, 5, 3], dtype=dtype), torch.tensor([2, 3, 3, 4]), 4, replace_from=0, replace_to=1
    )
    assert (expanded.dtype, expanded.tolist()) == (dtype, [7, 7, 1, 3])


def test_only_an_expansion_that_loses_its_values_is_replaced():
    broken, right = (
        SimpleNamespace(expand_batch_to_tokens=unwritten),
        SimpleNamespace(expand_batch_to_tokens=expand_batch_to_tokens),
    )
    assert mend_expansion(broken)
    assert broken.expand_batch_to_tokens is expand_batch_to_tokens
    assert not mend_expansion(right)


def test_a_fraction_lost_to_whole_numbers_is_replaced():
    def truncated(x, *rest):
        return expand_batch_to_tokens(x.long(), *rest).to(x.dtype)

    assert mend_expansion(SimpleNamespace(expand_batch_to_tokens=truncated))
