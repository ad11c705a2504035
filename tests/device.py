"""Where the tests of whole calls run: on an accelerator if there is one, else on the CPU."""

from __future__ import annotations

import torch

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
BACKENDS = ("EAGER", "SDPA") if DEVICE.type == "cpu" else ("TRITON",)
