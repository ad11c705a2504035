"""Where the tests of whole calls run: on an accelerator if there is one, else on the CPU.

TRITON_INTERPRET=1 keeps everything on the CPU: kernels are then Python, and compile nothing.
"""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = (
    None if INTERPRETED else torch.accelerator.current_accelerator(check_available=True)
) or torch.device("cpu")
COMPILED = DEVICE.type != "cpu"  # kernels are compiled: each kind of call costs seconds at first
BACKENDS = ("TRITON",) if COMPILED or INTERPRETED else ("EAGER", "SDPA")
