"""How far attention may lie from the oracle: computed from the data."""

from __future__ import annotations

import torch
from torch import Tensor

# A GPU's exp2 (ex2.approx) and reciprocal (div.full) are right to 2**-22 of their results. A weight
# goes through its own exponential, one that fades it or brings its part in, and the reciprocal that
# its part is divided by.
WEIGHT_ERROR = 3 * 2.0**-22
ROUNDING = 2.0**-24  # of one float32 addition


def allowed_error(exact: Tensor, eager: Tensor, spread: Tensor, keys: int) -> Tensor:
    """The largest error of an output, as a tensor of one number. What sums in another order and
    approximate exponentials add in float32, and what the dtype of the output loses.

    exact   the oracle's output in float64
    eager   the same formula's in the kernel's dtype
    spread  the oracle's output in float64 for the magnitudes of the values: sum(p |v|)
    keys    of a row, at most

    `2 (|eager - exact| + eps |exact|)`: twice what the formula loses in that dtype. How much of it
    that finds depends on the order in which torch adds, which is not a kernel's, so besides:
    `ROUNDING sqrt(keys) sum(p |v|)`: a running sum of `keys` terms is rounded as often, each time
    by at most ROUNDING of what has been summed, to either side. While it grows evenly the standard
    deviation of all is a third of this.
    `WEIGHT_ERROR (sum(p |v|) + |exact|)`: weights that are off by e_t of themselves, |e_t| <= e,
    move `sum(p v)` by `sum(p e_t (v - out))`, to the first order.
    """
    eps = torch.finfo(eager.dtype).eps
    formula = 2 * ((eager.double() - exact).abs().max() + eps * exact.abs().max())
    sums = ROUNDING * keys**0.5 * spread.max()
    return formula + sums + WEIGHT_ERROR * (spread + exact.abs()).max()
