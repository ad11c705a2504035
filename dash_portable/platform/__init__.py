"""What this process runs on: values in `facts`, the questions to devices in `detect`."""

from dash_portable.platform.detect import current_platform

__all__ = ["current_platform"]
