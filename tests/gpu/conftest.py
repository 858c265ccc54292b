"""What all GPU tests share: the skip where no Hopper GPU exists, inputs, poison, and the error criterion."""

import math
from pathlib import Path

import pytest
import torch

import fa3

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not hopper:
                item.add_marker(pytest.mark.skip(reason="no GPU of compute capability 9.0 on this machine"))


def eager_attention(q, k, v, softmax_scale=None, causal=False):
    """Plain PyTorch attention, the yardstick: scores and softmax in float32, probabilities in the inputs' dtype."""
    group = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    # A tensor-core product with float32 results: at scores of 1e4 its rounding shows, and is not what is tested.
    products = torch.bmm(queries.flatten(0, 1), keys.mT.flatten(0, 1), out_dtype=torch.float32)
    scores = products.unflatten(0, queries.shape[:2]) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(k.shape[1] - q.shape[1]), -math.inf)
    probabilities = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out = (probabilities.to(q.dtype) @ values).transpose(1, 2)
    return out, torch.logsumexp(scores, dim=-1)


def ulp(value, dtype):
    """Distance of two neighbouring numbers of ``dtype`` at the size of ``value``."""
    return 2.0 ** math.floor(math.log2(value)) * torch.finfo(dtype).eps if value > 0 else 0.0


def max_and_rms(error):
    return error.abs().max().item(), error.square().mean().sqrt().item()


@pytest.fixture
def assert_accurate():
    """(out, lse, q, k, v, softmax_scale, causal, rows): at most twice the error of eager PyTorch, plus one ulp.

    ``rows`` is a bool mask (batch, seqlen_q, heads) of the rows that count; all of them by default.
    """

    def check(out, lse, q, k, v, softmax_scale=None, causal=False, rows=None):
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.dtype == q.dtype
        expected, expected_lse = fa3.reference(q, k, v, softmax_scale=softmax_scale, causal=causal)
        yardstick, yardstick_lse = eager_attention(q, k, v, softmax_scale, causal)
        if rows is None:
            rows = torch.ones(q.shape[:3], dtype=torch.bool, device=q.device)
        expected, yardstick, out = expected[rows], yardstick[rows], out[rows]
        assert torch.isfinite(out).all(), "a value is not finite: an element was not written, or read from nowhere"
        if out.numel() == 0:
            return
        largest, rms = max_and_rms(out.double() - expected)
        allowed_largest, allowed_rms = max_and_rms(yardstick.double() - expected)
        assert largest <= 2 * allowed_largest + ulp(expected.abs().max().item(), q.dtype)
        assert rms <= 2 * allowed_rms + ulp(expected.square().mean().sqrt().item(), q.dtype)
        if lse is not None:
            assert lse.dtype == torch.float32
            assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
            lse, expected_lse, yardstick_lse = (x.mT[rows].double() for x in (lse, expected_lse, yardstick_lse))
            assert torch.equal(lse == -math.inf, expected_lse == -math.inf)
            seen = expected_lse != -math.inf
            # At scores of 1e4 float32 is no finer than 1e-3, and the tensor core's sums are coarser still.
            of_the_scores, _ = max_and_rms(yardstick_lse[seen] - expected_lse[seen]) if seen.any() else (0.0, 0.0)
            assert ((lse[seen] - expected_lse[seen]).abs() <= 1e-3 + 2 * of_the_scores).all()

    return check


@pytest.fixture
def attend():
    """`fa3.flash_attn_func` with the LSE, into memory that was filled with NaN before."""

    def call(q, k, v, softmax_scale=None, causal=False, function=fa3.flash_attn_func):
        poison(q, v)
        return function(q, k, v, softmax_scale, causal=causal, return_lse=True)

    return call


def poison(q, v):
    """Fill the blocks that the caching allocator will hand out for out and LSE with NaN."""
    out_shape, lse_shape = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    blocks = [torch.full(out_shape, math.nan, dtype=q.dtype, device=q.device) for _ in range(3)]
    blocks += [torch.full(lse_shape, math.nan, dtype=torch.float32, device=q.device) for _ in range(3)]
    del blocks


@pytest.fixture
def make():
    """q, k and v of normal random numbers on the GPU."""

    def tensors(batch=2, seqlen_q=128, seqlen_k=128, heads_q=4, heads_kv=2, head_dim=128, dtype=torch.bfloat16):
        shapes = ((seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
        return tuple(torch.randn(batch, *shape, head_dim, device="cuda").to(dtype) for shape in shapes)

    return tensors
