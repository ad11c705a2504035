"""Router rows of the golden cases, computed from a case's `seed` and `dim` with integers alone.

`dash_golden.json` holds only the answers. All rows are float32 and not yet rotated. A key is the
pattern of one of twelve topics plus noise of its own, and neighbouring tokens share their topic;
queries are made in the same way, so that selections are neither random nor uniform.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

_WORD = (1 << 64) - 1
_TOPICS = 12


def index_key(seed: int, position: int, dim: int) -> Row:
    """`ik` of the token at `position`."""
    topic = _mixed(seed, 11, position // 40) % _TOPICS
    return _noisy(_uniform(seed, 12, topic, dim), _uniform(seed, 13, position, dim))


def index_query(seed: int, position: int, dim: int) -> Row:
    """`iq` of the token at `position`."""
    topic = _mixed(seed, 14, position) % _TOPICS
    return _noisy(_uniform(seed, 12, topic, dim), _uniform(seed, 15, position, dim))


def head_cls(seed: int, dim: int) -> Row:
    """The learned query of the summaries."""
    row: Row = np.float32(2.0) * _uniform(seed, 16, 0, dim)
    return row


def _noisy(pattern: Row, noise: Row) -> Row:
    row: Row = pattern + np.float32(0.5) * noise
    return row


def _mix(z: int) -> int:
    """One step of SplitMix64."""
    z = (z + 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _mixed(seed: int, stream: int, row: int) -> int:
    return _mix(_mix(_mix(seed) ^ stream) ^ row)


def _uniform(seed: int, stream: int, row: int, dim: int) -> Row:
    """`dim` numbers in [-1, 1)."""
    base = _mixed(seed, stream, row)
    return np.array([(_mix(base ^ j) >> 40) / 8388608.0 - 1.0 for j in range(dim)], np.float32)
