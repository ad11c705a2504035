"""Does a shared layer store and select right on this machine? A document of a few pages through it.

The rest of the package decides what is right: the oracle which blocks, plain torch what the cache
holds, since that is where every later row looks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dash_portable import document
from dash_portable.cache import BYTES_END
from dash_portable.eager import EagerLayer
from dash_portable.trial.feed import Feed, Ran
from dash_portable.trial.inputs import LayerInputs, layer_inputs
from dash_portable.trial.verify import Check, Oracle

if TYPE_CHECKING:
    from dash_portable.shared_layer import SharedLayer

_PAGES, _ANSWER = 3, 3  # the answer turns to the first page, and a block is completed on the way


def check_layer(layer: type[SharedLayer], device: torch.device, dtype: torch.dtype) -> list[Check]:
    """A prompt, then decoded tokens one by one, each held to the oracle and to plain torch."""
    config = document.model_config()
    feed = Feed(
        document=document.paged(_PAGES, answer=_ANSWER),
        config=config,
        heads=2,
        kv_heads=1,
        dtype=dtype,
        device=device,
    )
    inputs = layer_inputs(
        feed.document, config, heads=2, kv_heads=1, dtype=dtype, device=device, seed=0
    )
    oracle, found = Oracle(feed), list[Check]()
    spans = [(0, feed.prompt_len)]
    spans += [(token, token + 1) for token in range(feed.prompt_len, len(feed.document))]
    for first, last in spans:
        found += _check_step(layer, feed, inputs, oracle, first, last)
    return found


def _check_step(
    layer: type[SharedLayer],
    feed: Feed,
    inputs: LayerInputs,
    oracle: Oracle,
    first: int,
    last: int,
) -> list[Check]:
    config, cache = feed.config, feed.caches[0]
    scale, floor = config.scale[0], config.floor[0]
    step, rows = feed.describe(first, last), inputs.rows(first, last)
    ours, eager, plain = layer(step), EagerLayer(step), cache.clone()
    looked = torch.arange(last - first)
    token = step.row_pos.long()
    _, index_query = ours.store(*rows, cache, inputs.head_cls)
    index_query = index_query.clone()
    eager.store(*rows, plain, inputs.head_cls)
    found = [_stored(cache, plain, feed)]
    wanted = eager.select(index_query, cache, inputs.head_cls, scale, floor)
    apart = [x.clone() for x in ours.select(index_query, cache, inputs.head_cls, scale, floor)]
    # The same again in one call, as a step does it: some layers have one launch for both.
    query, *together = ours.prepare(*rows, cache, inputs.head_cls, scale, floor)
    found.append(_stored(cache, plain, feed))
    for ids, bias in (apart, together):
        ran = Ran(seconds={}, query=query, index_query=index_query, ids=ids, bias=bias, out=query)
        found.append(oracle.rotation(inputs, ran, looked, token))
        found.append(oracle.selection(0, ran, looked, token))
        same = (ids == wanted[0]).all(1)
        off = (bias - wanted[1])[same].abs().nan_to_num(torch.inf)
        found.append(
            Check(
                name="bias",
                rows=int(same.sum()),
                error=float(off.max()) if len(off) else 0.0,
                allowed=_bias_allowed(feed, index_query, scale, floor),
            )
        )
    return found


def _stored(cache: Tensor, plain: Tensor, feed: Feed) -> Check:
    """The cache beside plain torch's: bytes equal, blanks untouched, numbers as near as roundings
    and angles of up to a turn let them be.
    """
    behind = slice(feed.config.index_dim, feed.config.index_dim + BYTES_END)
    theirs = cache[:, -1, :, behind].nan_to_num(-1.0)
    blanks = bool((cache.isnan() != plain.isnan()).any())
    wrong = blanks or not torch.equal(theirs, plain[:, -1, :, behind].nan_to_num(-1.0))
    gap = (cache.float() - plain.float()).abs().nan_to_num(0.0)
    # Summaries, too: they are means of index keys that are themselves so far apart.
    largest = float(plain[..., : feed.config.index_dim].nan_to_num(0.0).abs().max())
    turn = 2 * math.pi * torch.finfo(torch.float32).eps
    return Check(
        name="stored",
        rows=0,
        error=math.inf if wrong else float(gap.max()),
        allowed=2 * (torch.finfo(feed.dtype).eps + turn) * largest,
    )


def _bias_allowed(feed: Feed, index_query: Tensor, scale: float, floor: float) -> float:
    """How far apart biases may be whose scores were summed in another order.

    A prior is (x - tau) ** 2 with x half a score, and at least `floor`: a score that is off by e
    moves its logarithm by at most 2 e / sqrt(floor), and a mean over them by as much again.
    """
    config, eps = feed.config, torch.finfo(torch.float32).eps
    summaries = feed.summaries(0, len(feed.document) // config.block).nan_to_num(0.0)
    largest = float((index_query.abs().float() @ summaries.abs().float().T).max())
    score = eps * abs(scale) * largest / config.index_dim**0.5
    moved: float = 4 * score / math.sqrt(floor) + 4 * eps * abs(math.log(floor))
    return moved / config.sigma
