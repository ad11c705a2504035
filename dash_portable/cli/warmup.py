"""stub"""


def warmup() -> None:
    """x"""
