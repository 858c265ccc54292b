"""Inputs of tests of FP8, and how near their answers must be."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa3.mods import alibi, alibi_slopes, document

SINK = torch.tensor([0.5, -1.0, 3.0, 0.0])
DOCUMENT = document(torch.tensor([[0] * 60 + [1] * 90, [0] * 100 + [2] * 50], dtype=torch.int32))

OPTIONS = {
    "nothing": {},
    "causal": {"causal": True},
    "a window": {"window_size": (30, 4)},
    "chunks": {"attention_chunk": 40},
    "a softcap and a sink": {"softcap": 2.0, "sink": SINK},
    "modifications": {"score_mod": alibi(alibi_slopes(4)), "mask_mod": DOCUMENT},
    "a scale": {"softmax_scale": 0.4, "causal": True},
}


class ByOperator(TorchDispatchMode):
    """Lets no call take the way past the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def tensors(dtype=torch.bfloat16, seqlen_q=90, requires_grad=False):
    shapes = ((2, seqlen_q, 4, 32), (2, 150, 2, 32), (2, 150, 2, 48))
    return tuple(torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes)


def rope_of(positions=150, head_dim=32, dtype=torch.float32):
    angles = torch.arange(positions)[:, None] * 100.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def assert_near(answer, expected, dtype=torch.bfloat16):
    (out, lse), (expected_out, expected_lse) = answer, expected
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected_out, rtol=epsilon, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
