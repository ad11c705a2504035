"""stub"""


def bench() -> None:
    """x"""
