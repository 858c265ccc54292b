"""Every test starts from the same random numbers and chooses its backend itself."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start_for_every_test(monkeypatch):
    monkeypatch.delenv("FA3_BACKEND", raising=False)
    torch.manual_seed(0)
