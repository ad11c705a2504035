"""Every kind of step with canaries around every buffer and NaN in every blank.

Inputs, cache, scratch and outputs lie between canaries and are full of them; the results must be
those of an ordinary run, the canaries live, and no number of the cache change that is not the
step's to write.
"""

from __future__ import annotations

import pytest

from tests.device import DEVICE
from tests.gpu import sanitize
from tests.gpu.fences import fenced
from tests.gpu.kinds import KINDS, Prepared, launched
from tests.gpu.served import bits, same


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_written_or_used_beside_its_buffer(name: str) -> None:
    kind = KINDS[name]
    prepared = Prepared(kind)
    with launched(kind) as kernels:
        plain = prepared.run()
        with fenced(DEVICE) as fences:
            inside = prepared.run(fences.place)
    assert kernels
    assert fences.broken() == []
    assert plain.results.keys() == inside.results.keys()
    for what, found in plain.results.items():
        assert same(found, inside.results[what]), what
    for done in (plain, inside):
        changed = bits(done.cache) != bits(done.before)
        assert not bool((changed & ~done.allowed).any())
    if kind.run != "segments":
        assert same(plain.cache, inside.cache)


def test_the_kinds_launch_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """What is compiled for all GPUs is what is fenced here, and what a sanitizer watches."""
    assert sanitize.main([]) == 0
    assert "every kernel" in capsys.readouterr().out
