"""The checks of a call: what passes, and what each complaint says."""

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.problem import Problem, check_forward

GOOD = Problem(
    batch=2,
    seqlen_q=3,
    seqlen_k=5,
    heads_q=4,
    heads_kv=2,
    head_dim=16,
    head_dim_v=24,
    dtype="fp32",
    softmax_scale=0.25,
)


def tensors(batch=2, seqlen_q=3, seqlen_k=5, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24, dtype=torch.float32):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v).to(dtype)
    return q, k, v


def test_a_good_call_is_described_by_plain_numbers():
    assert check_forward(*tensors(), causal=True) == dataclasses.replace(GOOD, causal=True)


def test_the_default_scale_is_one_over_the_root_of_the_head_dim():
    assert check_forward(*tensors(head_dim=64)).softmax_scale == 0.125
    assert check_forward(*tensors(head_dim=64), softmax_scale=2).softmax_scale == 2.0


def test_a_problem_keeps_no_tensor_alive():
    q, k, v = tensors()
    problem = check_forward(q, k, v)
    watched = weakref.ref(q)
    del q, k, v
    gc.collect()
    assert watched() is None
    assert problem == GOOD


def test_a_problem_is_a_dictionary_key():
    assert {GOOD: 1}[dataclasses.replace(GOOD)] == 1


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 3),
    seqlen_q=st.integers(0, 5),
    seqlen_k=st.integers(0, 5),
    heads_kv=st.integers(1, 3),
    group=st.integers(0, 4),
    eighths=st.integers(1, 32),
    eighths_v=st.integers(1, 32),
)
def test_every_multiple_of_8_and_every_empty_size_is_legal(
    batch, seqlen_q, seqlen_k, heads_kv, group, eighths, eighths_v
):
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads_kv * group, heads_kv, 8 * eighths, 8 * eighths_v)
    problem = check_forward(q, k, v)
    assert (problem.head_dim, problem.head_dim_v) == (8 * eighths, 8 * eighths_v)
    assert problem.empty == (0 in q.shape)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 512), (8, 264), (256, 256), (192, 128)])
def test_wide_values_are_legal_beside_narrow_keys(head_dim, head_dim_v):
    assert check_forward(*tensors(head_dim=head_dim, head_dim_v=head_dim_v)).head_dim_v == head_dim_v


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 12}, r"head_dim .* is 12: .* multiples of 8 from 8 to 256"),
        ({"head_dim": 264}, r"head_dim .* is 264: .* from 8 to 256"),
        ({"head_dim": 0}, r"head_dim .* is 0"),
        ({"head_dim_v": 4}, r"head_dim_v .* is 4: .* from 8 to 512"),
        ({"head_dim_v": 520}, r"head_dim_v .* is 520: .* from 8 to 512"),
        ({"head_dim": 72, "head_dim_v": 264}, r"head_dim_v .* beside head_dim=72\) is 264: .* from 8 to 256"),
        ({"heads_q": 5}, r"q has 5 heads, k and v have 2"),
        ({"heads_q": 1}, r"q has 1 heads, k and v have 2"),
        ({"heads_kv": 0}, r"q has 4 heads, k and v have 0"),
    ],
)
def test_sizes_that_no_kernel_takes_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        check_forward(*tensors(**change))
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GOOD, **change)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_rank_names_the_tensor_and_its_shape(name):
    named = dict(zip("qkv", tensors(), strict=True))
    named[name] = named[name][0]
    with pytest.raises(ValueError, match=rf"^{name} has 3 dims, shape \(.*\): must be \(batch, seqlen, heads, head"):
        check_forward(**named)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_a_tensor_is_a_type_error(name):
    named = dict(zip("qkv", tensors(), strict=True))
    named[name] = named[name].numpy()
    with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, not ndarray"):
        check_forward(**named)


@pytest.mark.parametrize(
    ("name", "dim", "words"),
    [
        ("q", 0, "batch sizes"),
        ("k", 0, "batch sizes"),
        ("v", 0, "batch sizes"),
        ("k", 1, r"sequence lengths \(dim 1\) 6 and 5"),
        ("v", 1, r"sequence lengths \(dim 1\) 5 and 6"),
        ("k", 2, r"3 and 2 heads \(dim 2\)"),
        ("v", 2, r"2 and 3 heads \(dim 2\)"),
        ("q", 3, r"head dims \(dim 3\) 17 and 16"),
        ("k", 3, r"head dims \(dim 3\) 16 and 17"),
    ],
)
def test_sizes_that_disagree_are_named(name, dim, words):
    named = dict(zip("qkv", tensors(), strict=True))
    shape = list(named[name].shape)
    shape[dim] += 1
    named[name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=words):
        check_forward(**named)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_without_attention_are_a_type_error(dtype):
    with pytest.raises(TypeError, match=rf"q has dtype {dtype}: allowed are torch.float16, torch.bfloat16"):
        check_forward(*tensors(dtype=dtype))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_mix_of_dtypes_is_a_type_error(name):
    named = dict(zip("qkv", tensors(), strict=True))
    named[name] = named[name].half()
    with pytest.raises(TypeError, match=r"q, k and v have dtypes .*float16.*: must be the same"):
        check_forward(**named)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_on_two_devices_are_named(name):
    named = dict(zip("qkv", tensors(), strict=True))
    named[name] = named[name].to("meta")
    with pytest.raises(ValueError, match=r"on devices .*meta.*: must be the same"):
        check_forward(**named)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_last_stride_other_than_1_is_named(name):
    named = dict(zip("qkv", tensors(), strict=True))
    named[name] = named[name].transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(ValueError, match=rf"^{name} has strides \(.*\): the last must be 1"):
        check_forward(**named)


def test_all_other_strides_are_free():
    q, k, v = tensors()
    k = k[:1].expand(2, -1, -1, -1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    q = torch.zeros(1000).as_strided(q.shape, (500, 70, 17, 1), 3)
    assert check_forward(q, k, v) == GOOD


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_a_scale_must_be_finite_and_positive(scale):
    with pytest.raises(ValueError, match=rf"softmax_scale={scale}: must be finite and positive"):
        check_forward(*tensors(), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["1", True, 1j, [0.5]])
def test_a_scale_that_is_no_number_is_a_type_error(scale):
    with pytest.raises(TypeError, match=r"softmax_scale=.*: must be a float or None"):
        check_forward(*tensors(), softmax_scale=scale)


@pytest.mark.parametrize("field", ["batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv"])
def test_negative_sizes_are_refused_without_tensors(field):
    with pytest.raises(ValueError, match=rf"{field}=-1: must not be negative"):
        dataclasses.replace(GOOD, **{field: -1})


def test_a_sparse_tensor_is_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"k has layout torch.sparse_coo"):
        check_forward(q, k.to_sparse(), v)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "first"),
    [(3, 5, True, 0), (5, 3, True, 2), (5, 3, False, 0), (5, 0, False, 5), (5, 0, True, 5), (0, 3, True, 0)],
)
def test_rows_without_keys_come_first(seqlen_q, seqlen_k, causal, first):
    problem = dataclasses.replace(GOOD, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal)
    assert problem.first_row_with_keys == first
