"""The bound on attention's error in float32 lets no fault through that rounding is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.prefill_batch import Batch, Part
from tests.kernels.test_attend_prefill import choose
from tests.kernels.tolerance import allowed_error

Shares = tuple[Tensor, Tensor]  # weights [H, T] and values [T, H, D] of one row


def weights(batch: Batch, i: int, ids: Tensor, bias: Tensor) -> Tensor:
    """float64 [H, T]: of row i for every token of its sequence, the largest of each head 1."""
    seq, pos, rule = int(batch.row["seq"][i]), int(batch.row["pos"][i]), batch.config
    low = max(pos + 1 - rule.local, 0)
    prior = torch.full((batch.parts[seq].length,), -torch.inf, dtype=torch.float64)
    prior[low : pos + 1] = 0
    for block, added in zip(ids[i].tolist(), bias[i].tolist(), strict=True):
        if block >= 0:
            prior[block * rule.block : min((block + 1) * rule.block, low)] = added
    keys = batch.keys[seq].double()
    logit = torch.einsum("hd,thd->ht", batch.query[i].double(), keys) / batch.width**0.5 + prior
    return (logit - logit.amax(-1, keepdim=True)).exp()


def without_the_lightest_key(weight: Tensor, value: Tensor) -> Shares:
    lightest = torch.where(weight > 0, weight, torch.inf).argmin(-1, keepdim=True)
    return weight.scatter(-1, lightest, 0.0), value


def weights_in(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Shares]:
    return lambda weight, value: (weight.to(dtype).double(), value)


def in_tensor_float32(weight: Tensor, value: Tensor) -> Shares:
    """Both operands of the product with 10 bits behind the point."""

    def cut(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)

    return cut(weight), cut(value)


FAULTS = {
    "key": without_the_lightest_key,
    "bfloat16": weights_in(torch.bfloat16),
    "float16": weights_in(torch.float16),
    "tf32": in_tensor_float32,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_one_row_are_beyond_it(fault: str) -> None:
    batch = Batch([Part((), 610, 9)], heads=2)
    ids, bias = choose(batch)
    exact = batch.attended(ids, bias)
    rule = batch.config
    allowed = allowed_error(
        exact,
        batch.attended(ids, bias, torch.float32),
        batch.attended(ids, bias, magnitudes=True),
        rule.topk * rule.block + rule.local,
    )
    for i in batch.live():
        found = []
        for change in (lambda weight, value: (weight, value), FAULTS[fault]):
            weight, value = change(weights(batch, i, ids, bias), batch.values[0].double())
            shares = weight / weight.sum(-1, keepdim=True)
            found.append(torch.einsum("ht,thd->hd", shares, value))
        assert (found[0] - exact[i]).abs().max() < 1e-12
        assert (found[1] - exact[i]).abs().max() > 2 * allowed
