import math

import pytest
import torch

from specserve_workers.speculation.divergence import kl_divergence_nats


def test_divergence_of_two_distributions() -> None:
    target = torch.tensor([[0.5, 0.5]]).log()
    draft = torch.tensor([[0.9, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_divergence_nats(target, draft, temperatures=None).item() == pytest.approx(expected)


def test_equal_distributions_have_none_whatever_the_scale_of_the_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert kl_divergence_nats(logits, logits + 5.0, temperatures=None).abs().max().item() < 1e-5


def test_temperature_divides_both_and_zero_counts_as_one() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(3, 20, generator=generator), torch.randn(3, 20, generator=generator)
    got = kl_divergence_nats(target, draft, temperatures=torch.tensor([0.0, 1.0, 0.5]))
    plain = kl_divergence_nats(target, draft, temperatures=None)
    assert got[:2].tolist() == pytest.approx(plain[:2].tolist())
    halved = kl_divergence_nats(target[2:] / 0.5, draft[2:] / 0.5, temperatures=None)
    assert got[2].item() == pytest.approx(halved.item())


def test_a_token_the_draft_excludes_costs_a_bounded_amount() -> None:
    target = torch.tensor([[0.0, -math.inf]])
    draft = torch.tensor([[-math.inf, 0.0]])
    assert kl_divergence_nats(target, draft, temperatures=None).item() == pytest.approx(18.42, abs=0.01)


def test_logits_are_left_alone_and_half_precision_is_fine() -> None:
    logits = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    draft = torch.tensor([[2.0, 1.0]], dtype=torch.bfloat16)
    got = kl_divergence_nats(logits, draft, temperatures=torch.tensor([2.0]))
    assert got.dtype == torch.float32
    assert logits.tolist() == [[1.0, 2.0]]
    assert draft.tolist() == [[2.0, 1.0]]


def test_nan_stays_visible() -> None:
    logits = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    got = kl_divergence_nats(logits, torch.zeros(2, 2), temperatures=None)
    assert got.isnan().tolist() == [True, False]
