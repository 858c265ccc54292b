"""Every test starts from the same random numbers and from an environment in which the user chose nothing."""

from pathlib import Path

import pytest
import torch

from fa3.compiler.store import default_store

CHOICES = ("CC", "FA3_BACKEND", "FA3_CUDA", "FA3_CUTE_RUNTIME", "FA3_STORE")
#: Tests on a GPU run the kernels that the user has; which backend computes is theirs to say.
GPU_TESTS = Path(__file__).parent / "gpu"


# Of a module, not of a test: fixtures of a module compile too, and this one comes before them.
@pytest.fixture(scope="module", autouse=True)
def _the_user_chose_nothing(request):
    cleared = CHOICES if GPU_TESTS not in request.path.parents else ("FA3_BACKEND",)
    default_store.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in cleared:
            patch.delenv(name, raising=False)
        yield
    default_store.cache_clear()


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    torch.manual_seed(0)


@pytest.fixture
def default_dtype():
    """Sets PyTorch's default dtype for the rest of a test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)
