"""placeholder"""
from typing import Any


def report_or_none(cubin: bytes) -> Any:
    return None
