"""The device and the streams that launches are queued on."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' one."""
    if device.type == "cpu" or device.index in (None, torch.accelerator.current_device_index()):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


class InOrder:
    """In the place of Beside where one stream takes all."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def join(self) -> None:
        """What was queued before is waited for anyway."""


class Beside:
    """A second stream of a device, made once and capturable: what is queued within `with` follows
    what the current stream holds by then, and runs beside what it takes until `join`.

    Nothing may be allocated within: the allocator would think it of the second stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._second = torch.Stream(device)
        self._first = self._second
        self._begun, self._done = torch.Event(device), torch.Event(device)

    def __enter__(self) -> None:
        self._first = torch.accelerator.current_stream(self._second.device)
        self._begun.record(self._first)
        self._second.wait_event(self._begun)
        torch.accelerator.set_stream(self._second)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._done.record(self._second)
        torch.accelerator.set_stream(self._first)
        if kind is not None:
            self.join()

    def join(self) -> None:
        """The current stream waits for what was queued beside it."""
        self._first.wait_event(self._done)
