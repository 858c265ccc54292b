"""The checks of a call: what passes, and what each complaint says."""

import dataclasses
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3.block_masks import create_block_mask
from fa3.mods import MaskMod, ScoreMod, alibi, alibi_slopes, document
from fa3.options import Options
from fa3.problem import Problem, check_forward
from fa3.reference import visible_keys

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


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
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


def bend(score, *index_and_aux):
    return score


def see_all(batch, head, q_index, kv_index, *aux):
    return kv_index >= 0


MODS = {
    "score_mod": ScoreMod("problem_mods:bend", bend, (torch.ones(3), torch.ones(2, 2, dtype=torch.int32))),
    "mask_mod": MaskMod("problem_mods:see_all", see_all, (torch.ones(1, 1, 4, dtype=torch.int32),)),
}


def test_options_are_described_by_plain_numbers_and_names():
    options = Options(
        window_left=3,
        window_right=1,
        attention_chunk=4,
        softcap=30.0,
        sink=torch.zeros(4),
        qv=torch.zeros(2, 3, 4, 24),
        pack_gqa=False,
        sm_margin=2,
        **MODS,
    )
    assert check_forward(*tensors(), 0.25, options=options) == dataclasses.replace(
        GOOD,
        window_left=3,
        window_right=1,
        attention_chunk=4,
        softcap=30.0,
        sink=True,
        qv=True,
        pack_gqa=False,
        sm_margin=2,
        score_mod="problem_mods:bend",
        score_aux=("f1", "i2"),
        mask_mod="problem_mods:see_all",
        mask_aux=("i3",),
    )


def test_a_block_mask_is_described_by_its_mask_mod():
    block_mask = create_block_mask(MODS["mask_mod"], 2, 1, 3, 5)
    problem = check_forward(*tensors(), options=Options(block_mask=block_mask))
    assert problem == dataclasses.replace(GOOD, mask_mod="problem_mods:see_all", mask_aux=("i3",), block_sparse=True)
    assert problem.mask == "blocks"


def test_no_options_and_options_that_say_nothing_are_one_problem():
    assert check_forward(*tensors(), options=Options()) == GOOD


def test_the_default_scale_counts_the_columns_of_qv():
    options = Options(qv=torch.zeros(2, 3, 4, 9 * 8))
    assert check_forward(*tensors(head_dim=72, head_dim_v=72), options=options).softmax_scale == 144**-0.5
    assert check_forward(*tensors(head_dim=72, head_dim_v=72), 2.0, options=options).softmax_scale == 2.0


def test_a_sink_may_be_of_any_stride_and_qv_of_any_but_the_last():
    sink, qv = torch.zeros(1).expand(4), torch.zeros(3, 2, 4, 24).transpose(0, 1)
    problem = check_forward(*tensors(), options=Options(sink=sink, qv=qv))
    assert problem.sink
    assert problem.qv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sink_has_a_dtype_of_its_own(dtype):
    assert check_forward(*tensors(), options=Options(sink=torch.zeros(4, dtype=dtype))).sink


def test_a_float64_sink_goes_with_float64_alone():
    sink = torch.zeros(4, dtype=torch.float64)
    assert check_forward(*tensors(dtype=torch.float64), options=Options(sink=sink)).sink
    with pytest.raises(TypeError, match=r"sink has dtype torch\.float64: allowed are torch\.float32, torch\.bfloat16"):
        check_forward(*tensors(), options=Options(sink=sink))


def block_mask_for(batch=2, heads=4, seqlen_q=3, seqlen_k=5):
    return create_block_mask(MODS["mask_mod"], batch, heads, seqlen_q, seqlen_k)


BAD_OPTIONS = {
    "a sink that is no tensor": ({"sink": [0.0] * 4}, TypeError, r"sink must be a torch\.Tensor, not list"),
    "a sink of integers": ({"sink": torch.zeros(4, dtype=torch.int32)}, TypeError, r"sink has dtype torch\.int32"),
    "a sink for other heads": ({"sink": torch.zeros(2)}, ValueError, r"sink has shape \(2,\): must be .* \(4,\)"),
    "a sink of two dims": ({"sink": torch.zeros(1, 4)}, ValueError, r"sink has shape \(1, 4\)"),
    "a sparse sink": ({"sink": torch.zeros(4).to_sparse()}, ValueError, r"sink has layout torch\.sparse_coo"),
    "a sink elsewhere": ({"sink": torch.zeros(4, device="meta")}, ValueError, "sink is on device meta, q on cpu"),
    "a qv of the shape of q": ({"qv": torch.zeros(2, 3, 4, 16)}, ValueError, r"qv has shape .*\(2, 3, 4, 24\)"),
    "a qv of K/V heads": ({"qv": torch.zeros(2, 3, 2, 24)}, ValueError, r"qv has shape"),
    "a qv of another dtype": ({"qv": torch.zeros(2, 3, 4, 24).half()}, TypeError, r"qv has dtype torch\.float16, q"),
    "a qv elsewhere": ({"qv": torch.zeros(2, 3, 4, 24, device="meta")}, ValueError, "qv is on device meta, q on cpu"),
    "a qv of stride 2": ({"qv": torch.zeros(2, 3, 4, 48)[..., ::2]}, ValueError, r"qv has strides .*last must be 1"),
    "a window below -1": ({"window_left": -2}, ValueError, r"window_left=-2: allowed are -1 and up"),
    "a chunk below 0": ({"attention_chunk": -1}, ValueError, r"attention_chunk=-1: allowed are 0 and up"),
    "a margin below 0": ({"sm_margin": -1}, ValueError, r"sm_margin=-1: allowed are 0 and up"),
    "a softcap below 0": ({"softcap": -1.0}, ValueError, r"softcap=-1.0: must be finite"),
    "a softcap that is no number": ({"softcap": math.nan}, ValueError, r"softcap=nan: must be finite"),
    "a softcap beyond float32": ({"softcap": 1e300}, ValueError, r"softcap=1e\+300: .* computed in float32"),
    "a softcap without inverse": ({"softcap": 1e-40}, ValueError, r"softcap=1e-40: .* computed in float32"),
    "two masks": (
        {"mask_mod": MODS["mask_mod"], "block_mask": block_mask_for()},
        ValueError,
        "block_mask and mask_mod are both given",
    ),
    "a block mask and a window": (
        {"block_mask": block_mask_for(), "window_left": 100},
        ValueError,
        "block_mask goes with no causal, window_size",
    ),
    "a block mask and a chunk": (
        {"block_mask": block_mask_for(), "attention_chunk": 100},
        ValueError,
        "block_mask goes with no causal, window_size",
    ),
    "a block mask for other queries": (
        {"block_mask": block_mask_for(seqlen_q=4)},
        ValueError,
        "made for seqlen_q=4 and seqlen_k=5, the call has 3 and 5",
    ),
    "a block mask for other keys": ({"block_mask": block_mask_for(seqlen_k=4)}, ValueError, "the call has 3 and 5"),
    "a block mask for other sequences": (
        {"block_mask": block_mask_for(batch=3)},
        ValueError,
        "made for batch 3 and 4 heads: allowed are 1 or 2, and 1 or 4",
    ),
    "a block mask for other heads": ({"block_mask": block_mask_for(heads=2)}, ValueError, "batch 2 and 2 heads"),
    "a block mask elsewhere": (
        {"block_mask": create_block_mask(MaskMod("problem_mods:see_all", see_all), 1, 1, 3, 5, device="meta")},
        ValueError,
        "block_mask is on device meta, q on cpu",
    ),
    "a mod that reads another device": (
        {"score_mod": ScoreMod("problem_mods:bend", bend, (torch.ones(3), torch.ones(3, device="meta")))},
        ValueError,
        r"score_mod\.aux\[1\] is on device meta, q on cpu",
    ),
    "slopes of other heads": ({"score_mod": alibi(alibi_slopes(2))}, ValueError, r"slopes has shape \(2,\)"),
    "documents of shorter sequences": (
        {"mask_mod": document(torch.zeros(2, 4, dtype=torch.int32))},
        ValueError,
        r"document_ids has shape \(2, 4\)",
    ),
}


@pytest.mark.parametrize(("given_options", "error", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options_that_do_not_fit_are_named(given_options, error, words):
    with pytest.raises(error, match=words):
        check_forward(*tensors(), options=Options(**given_options))


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_block_mask_goes_with_no_causal_mask_even_where_that_hides_nothing(seqlen_q):
    options = Options(block_mask=block_mask_for(seqlen_q=seqlen_q))
    with pytest.raises(ValueError, match="block_mask goes with no causal"):
        check_forward(*tensors(seqlen_q=seqlen_q), causal=True, options=options)


@given(
    seqlen_q=st.integers(0, 9),
    seqlen_k=st.integers(0, 9),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 12), st.integers(-1, 12)),
    chunk=st.integers(0, 20) | st.just(2**63),
)
@settings(max_examples=200, deadline=None)
def test_bounds_and_kinds_of_masks_hide_what_the_call_asked_to_hide(seqlen_q, seqlen_k, causal, window, chunk):
    problem = dataclasses.replace(
        GOOD,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=causal,
        window_left=window[0],
        window_right=window[1],
        attention_chunk=chunk,
    )
    expected = visible_keys(seqlen_q, seqlen_k, causal, window, min(chunk, 1000))
    left, right, chunk = problem.bounds
    assert torch.equal(visible_keys(seqlen_q, seqlen_k, False, (left, right), chunk), expected)
    assert max(problem.bounds) <= seqlen_q + seqlen_k
    rows = expected.any(dim=1).nonzero()
    if len(rows):
        assert problem.first_row_with_keys == int(rows[0])
        assert len(rows) == seqlen_q - int(rows[0])
    else:
        assert problem.first_row_with_keys == seqlen_q
    if problem.mask == "full":
        assert expected.all()
    if problem.mask == "causal":
        assert torch.equal(expected, visible_keys(seqlen_q, seqlen_k, causal=True))


def test_a_scale_that_overflows_over_the_softcap_is_refused():
    q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"softmax_scale=8.0, softcap=1.2e-38: .* finite in float32"):
        check_forward(q, q, q, 8.0, options=Options(softcap=1.2e-38))
