"""Tests, importable as `tests.*`, so that they can share the brute force and the prompts."""
