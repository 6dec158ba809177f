"""The stand-in for the engine's expansion, and the probe that tells whether it is needed."""

import torch

from specserve_workers.vllm.compat import (
    expand_batch_to_tokens,
    is_expansion_broken,
    replace_placeholder_drafts,
)


def test_each_value_is_repeated_once_per_draft_token() -> None:
    running_sum = torch.tensor([2, 2, 5], dtype=torch.int32)
    got = expand_batch_to_tokens(torch.tensor([0.5, 9.0, 2.0]), running_sum, 5)
    assert got.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert got.dtype == torch.float32


def test_greedy_temperature_is_replaced_and_nothing_else() -> None:
    running_sum = torch.tensor([1, 3], dtype=torch.int32)
    got = expand_batch_to_tokens(torch.tensor([0.0, 0.7]), running_sum, 3, replace_from=0, replace_to=1)
    assert got.tolist() == torch.tensor([1.0, 0.7, 0.7]).tolist()


def test_whole_numbers_keep_their_type() -> None:
    got = expand_batch_to_tokens(torch.tensor([7], dtype=torch.int32), torch.tensor([2]), 2)
    assert (got.tolist(), got.dtype) == ([7, 7], torch.int32)


def test_the_probe_tells_a_right_expansion_from_one_that_never_writes() -> None:
    assert not is_expansion_broken(expand_batch_to_tokens)
    assert is_expansion_broken(lambda x, cu, n, **_: torch.full((n,), 4.4e-24))


def test_only_placeholders_are_replaced() -> None:
    drafts = {"padded": [-1, -1, -1], "real": [5, 6], "none": []}
    replace_placeholder_drafts(drafts)
    assert drafts == {"padded": [0, 0, 0], "real": [5, 6], "none": []}
