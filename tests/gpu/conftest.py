"""What all GPU tests share: the skip where no Hopper GPU exists, inputs, poison, and the error criterion."""

import math
from pathlib import Path

import pytest
import torch

import fa3
from eager import masked_scores, with_sink

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not hopper:
                item.add_marker(pytest.mark.skip(reason="no GPU of compute capability 9.0 on this machine"))


def eager_attention(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    sink=None,
    qv=None,
    score_mod=None,
    mask_mod=None,
):
    """Plain PyTorch attention, the yardstick: scores and softmax in float32, probabilities in the inputs' dtype."""
    heads, head_dim = q.shape[2:]
    seqlen_k, heads_kv, head_dim_v = v.shape[1:]
    queries = q.transpose(1, 2)
    keys, values = (x.transpose(1, 2).repeat_interleave(heads // max(heads_kv, 1), dim=1) for x in (k, v))
    if softmax_scale is None:
        softmax_scale = (head_dim + (0 if qv is None else head_dim_v)) ** -0.5
    # Tensor-core products with float32 results: at scores of 1e4 their rounding shows, and is not what is tested.
    scores = _products(queries, keys)
    if qv is not None:
        scores = scores + _products(qv.transpose(1, 2), values)
    scores = scores * softmax_scale
    scores = masked_scores(scores, causal, window_size, attention_chunk, softcap, score_mod, mask_mod)
    logits = with_sink(scores, sink)
    probabilities = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :seqlen_k]
    out = (probabilities.to(q.dtype) @ values).transpose(1, 2)
    return out, torch.logsumexp(logits, dim=-1)


def _products(left, right):
    return torch.bmm(left.flatten(0, 1), right.mT.flatten(0, 1), out_dtype=torch.float32).unflatten(0, left.shape[:2])


def ulp(value, dtype):
    """Distance of two neighbouring numbers of ``dtype`` at the size of ``value``."""
    return 2.0 ** math.floor(math.log2(value)) * torch.finfo(dtype).eps if value > 0 else 0.0


def max_and_rms(error):
    return error.abs().max().item(), error.square().mean().sqrt().item()


@pytest.fixture
def assert_accurate():
    """(out, lse, q, k, v, softmax_scale, causal, rows, options of `fa3.reference`): at most twice the error of eager
    PyTorch, plus one ulp.

    ``rows`` is a bool mask (batch, seqlen_q, heads) of the rows that count; all of them by default.
    """

    def check(out, lse, q, k, v, softmax_scale=None, causal=False, rows=None, **options):
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.dtype == q.dtype
        expected, expected_lse = fa3.reference(q, k, v, softmax_scale=softmax_scale, causal=causal, **options)
        yardstick, yardstick_lse = eager_attention(q, k, v, softmax_scale, causal, **options)
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

    def call(q, k, v, softmax_scale=None, causal=False, function=fa3.flash_attn_func, **options):
        poison(q, v)
        return function(q, k, v, softmax_scale, causal=causal, return_lse=True, **options)

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

    def tensors(
        batch=2, seqlen_q=128, seqlen_k=128, heads_q=4, heads_kv=2, head_dim=128, dtype=torch.bfloat16, head_dim_v=None
    ):
        q_shape, k_shape = (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_k, heads_kv, head_dim)
        v_shape = (*k_shape[:3], head_dim_v or head_dim)
        return tuple(torch.randn(shape, device="cuda").to(dtype) for shape in (q_shape, k_shape, v_shape))

    return tensors


@pytest.fixture
def available():
    """Skips the test of a spec that this machine neither has nor can compile."""

    def check(spec):
        from fa3.compiler.store import default_store
        from fa3.compiler.target import dsl_installed

        if default_store().find(spec) is None and not dsl_installed():
            pytest.skip("not in the store, and no compiler here")

    return check
