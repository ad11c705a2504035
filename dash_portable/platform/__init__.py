"""What this process runs on: values in `facts`, the questions to devices in `detect`."""
