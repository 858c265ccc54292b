"""What the kernels of gradients get for options, wide values, groups and empty problems; a recorder in their place."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from backward_recorder import backward, contiguous, fill, install, results_of, write
from fa3 import mods
from fa3.backward_spec import BackwardSpec, FinishSpec, PrepareSpec, QueryGradientSpec
from fa3.key_lists import key_lists
from recorder import block_mask, memory, tensors

KINDS = [PrepareSpec, BackwardSpec, FinishSpec]


@pytest.fixture
def kernels(monkeypatch):
    return install(monkeypatch)


# Options ----------------------------------------------------------------------------------------------------------


def test_qv_is_more_columns_of_q_and_v_as_many_more_of_k(kernels):
    q, k, v = tensors(head_dim=64, heads_kv=4)
    qv = torch.randn(2, 100, 4, 64).to(q.dtype)
    seen = {}

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            seen["q"] = memory(call["q"], 2 * q.numel(), q.dtype).view(2, 100, 4, 128)
            seen["k"] = memory(call["k"], 2 * k.numel(), k.dtype).view(2, 130, 4, 128)
            fill(call["dk"], 2 * k.numel(), 2.0)
            fill(call["dv"], v.numel(), 3.0)
        elif type(call["spec"]) is FinishSpec:
            fill(call["dq"], 2 * q.numel(), 1.0)

    kernels.look = look
    dq, dk, dv, dsink, dqv = backward(q, k, v, qv=qv)
    assert torch.equal(seen["q"], torch.cat([q, qv], dim=-1))
    assert torch.equal(seen["k"], torch.cat([k, v], dim=-1))
    main, finish = kernels.one(BackwardSpec), kernels.one(FinishSpec)
    assert (main["head_dim"], main["head_dim_v"], finish["head_dim"]) == (128, 64, 128)
    assert (main["spec"].head_dim, main["spec"].head_dim_v) == (128, 128)
    assert main["softmax_scale"] == pytest.approx(1 / math.sqrt(128))
    assert main["extra_numbers"] is None
    # v has a gradient as values, and one as keys.
    assert [x.unique().tolist() for x in (dq, dk, dv, dqv)] == [[1.0], [2.0], [5.0], [1.0]]
    assert dqv.shape == qv.shape
    assert dsink is None


@pytest.mark.parametrize(
    ("options", "extras"),
    [
        ({"window_left": 10, "window_right": 5}, (10, 5, 0)),
        ({"window_left": 10}, (10, 100, 0)),
        ({"attention_chunk": 7, "causal": True}, (130, 0, 7)),
        ({"softcap": 5.0}, (5.0,)),
        ({"window_left": 10, "softcap": 5.0}, (10, 100, 0, 5.0)),
    ],
    ids=str,
)
def test_bounds_and_caps_go_to_the_main_kernel(kernels, options, extras):
    backward(*tensors(), **options)
    assert kernels.one(BackwardSpec)["extra_numbers"] == extras


def test_modifications_go_to_the_main_kernel_with_their_derivative_and_tensors(kernels):
    bias, ids = torch.zeros(4, 9), torch.zeros(2, 130, dtype=torch.int32)
    backward(*tensors(), score_mod=mods.relative_bias(bias), mask_mod=mods.document(ids))
    main = kernels.one(BackwardSpec)
    assert main["extra_numbers"] == (bias.data_ptr(), 4, 9, ids.data_ptr(), 2, 130)
    assert main["spec"].score_mod == "fa3.kernels.mods:relative_bias"
    assert main["spec"].derivative == "fa3.kernels.mods:additive"
    assert main["spec"].mask_mod == "fa3.kernels.mods:document"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((1, 1), (0, 0)), ((2, 1), (2, 0)), ((1, 4), (0, 2)), ((2, 4), (8, 2))],
    ids=str,
)
def test_lists_of_a_block_mask_go_to_the_main_kernel_by_keys(kernels, sizes, strides, deterministic):
    ids = torch.zeros(2, 200, dtype=torch.int32)
    # 3 blocks of queries and 2 of keys.
    mask = block_mask(*sizes, seqlen_q=300, seqlen_k=200, aux=(ids,))
    seen = []

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            seen.append(call["extra_numbers"])

    kernels.look = look
    backward(*tensors(seqlen_q=300, seqlen_k=200), block_mask=mask, deterministic=deterministic)
    main = kernels.one(BackwardSpec)
    spec = main["spec"]
    assert (spec.mask, spec.mask_mod, spec.mask_aux) == ("blocks", "one:mask", "i2")
    assert spec.deterministic == deterministic
    lists = key_lists(mask, spec.tile_m, spec.tile_n)
    query_tiles = math.ceil(300 / spec.tile_m)
    assert seen == [
        (
            *(ids.data_ptr(), 2, 200, lists.counts.data_ptr(), lists.indices.data_ptr(), *strides, query_tiles),
            *([lists.turns.data_ptr()] if deterministic else []),
        )
    ]


def test_what_makes_dq_by_queries_gets_the_lists_as_they_are(kernels):
    mask = block_mask(heads=4, seqlen_q=300, seqlen_k=200)
    backward(*tensors(seqlen_q=300, seqlen_k=200, head_dim=256), block_mask=mask, deterministic=True)
    main, last = kernels.one(BackwardSpec), kernels.one(QueryGradientSpec)
    assert (last["spec"].mask, last["spec"].mask_mod, last["spec"].tile_m) == ("blocks", "one:mask", 128)
    assert last["extra_numbers"] == (mask.counts.data_ptr(), mask.indices.data_ptr(), 0, 3, 2)
    lists = key_lists(mask, main["spec"].tile_m, main["spec"].tile_n)
    # It has no order, so it needs no turns.
    assert main["extra_numbers"] == (lists.counts.data_ptr(), lists.indices.data_ptr(), 0, 2, 5)


def test_rows_that_a_block_mask_hides_give_nothing_whatever_they_hold(kernels):
    q, k, v = tensors(head_dim=128)
    dout, out, lse = results_of(q, v)
    q[1, 40:], dout[1, 40:] = math.nan, math.nan
    lse[1, :, 40:] = -math.inf
    read = []

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            for name in ("q", "dout"):
                values = (ctypes.c_uint16 * q.numel()).from_address(call[name])
                read.append(torch.frombuffer(values, dtype=torch.bfloat16).view(q.shape).clone())

    kernels.look = look
    backward(q, k, v, given=(dout, out, lse), block_mask=block_mask())
    for given, shown in zip((q, dout), read, strict=True):
        assert torch.equal(shown[1, :40], given[1, :40])
        assert not shown[1, 40:].any()


def test_wide_dtypes_have_no_kernels_and_say_so(kernels):
    with pytest.raises(NotImplementedError, match=r"no gradient for this call: dtype fp32"):
        backward(*tensors(dtype=torch.float32))
    assert not kernels.specs


def test_a_sink_gets_minus_its_probability_times_delta_over_all_rows(kernels):
    q, k, v = tensors(batch=1, heads_q=2, heads_kv=1)
    dout, out, _ = results_of(q, v)
    sink = torch.tensor([0.5, -1.0])
    lse = torch.full((1, 2, 100), 2.0)

    def look(call):
        if type(call["spec"]) is PrepareSpec:
            rows = math.ceil(100 / call["spec"].tile_m) * call["spec"].tile_m
            delta = torch.ones(2, rows)
            delta[:, 100:] = math.nan  # rows that are none
            write(call["delta"], delta)

    kernels.look = look
    *_, dsink, _ = backward(q, k, v, given=(dout, out, lse), sink=sink)
    torch.testing.assert_close(dsink, -100 * torch.exp(sink - 2.0))
    # Of a row that sees the sink alone the probability is 1, of a sink of +inf too.
    *_, dsink, _ = backward(q, k, v, given=(dout, out, torch.full((1, 2, 100), math.inf)), sink=sink + math.inf)
    assert dsink.tolist() == [-100, -100]


# Values in parts --------------------------------------------------------------------------------------------------


def test_wide_values_go_in_parts_of_columns_whose_shares_are_added(kernels):
    q, k, v = tensors(head_dim=64, head_dim_v=512, heads_kv=4)
    dout, out, lse = results_of(q, v)
    dlse = torch.randn_like(lse)
    seen = []

    def look(call):
        spec = call["spec"]
        if type(spec) is BackwardSpec:
            rows = math.ceil(100 / spec.tile_m) * spec.tile_m
            write(call["dq"], torch.ones(2 * 4 * rows * spec.head_dim))
            fill(call["dk"], k.numel(), 1.0 + len(kernels.of(BackwardSpec)))
        elif type(spec) is FinishSpec:
            seen.append(memory(call["sums"], 100, torch.float32))

    kernels.look = look
    _, dk, dv, _, _ = backward(q, k, v, dlse=dlse, given=(dout, out, lse))
    assert [type(call["spec"]) for call in kernels.calls] == [*KINDS[:2], *KINDS]
    first, second = kernels.of(BackwardSpec)
    for name, tensor in (("v", v), ("dout", dout), ("dv", dv)):
        assert [call[name] - tensor.data_ptr() for call in (first, second)] == [0, 2 * 256], name
        assert first[f"{name}_strides"] == second[f"{name}_strides"] == contiguous(tensor)
    assert [call["out"] - out.data_ptr() for call in kernels.of(PrepareSpec)] == [0, 2 * 256]
    assert [call["head_dim_v"] for call in (first, second)] == [256, 256]
    # The LSE has one gradient, which is not counted twice.
    assert [call["dlse"] for call in kernels.of(PrepareSpec)] == [dlse.data_ptr(), 0]
    assert (dk == 5.0).all()
    assert (seen[0] == 2.0).all()


def test_the_last_part_has_the_columns_that_are_left(kernels):
    backward(*tensors(head_dim=64, head_dim_v=264))
    assert [call["head_dim_v"] for call in kernels.of(BackwardSpec)] == [256, 8]
    assert [call["head_dim_v"] for call in kernels.of(PrepareSpec)] == [256, 8]


# Parts of the query heads of a K/V head -----------------------------------------------------------------------------


@pytest.mark.parametrize("into", [False, True], ids=["new", "given"])
def test_each_part_of_a_group_has_a_dk_and_a_dv_of_its_own_which_are_added(kernels, into):
    q, k, v = tensors(heads_q=8, heads_kv=2, head_dim=64, head_dim_v=128)
    given = tuple(torch.zeros(*x.shape[:3], x.shape[3] + 8, dtype=x.dtype)[..., :-8] for x in (q, k, v))

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            assert call["parts"] == 4
            # (batch, row, head) strides of as many heads as there are parts.
            assert call["dk_strides"] == (130 * 8 * 64, 8 * 64, 64)
            assert call["dv_strides"] == (130 * 8 * 128, 8 * 128, 128)
            for name, columns, scale in (("dk", 64, 1), ("dv", 128, 2)):
                heads = scale * torch.arange(8.0).bfloat16()[None, None, :, None]
                write(call[name], heads.expand(2, 130, 8, columns).contiguous())

    kernels.look = look
    _, dk, dv, _, _ = backward(q, k, v, into=given if into else None)
    # Those of a K/V head stand next to each other.
    expected = torch.tensor([0.0 + 1 + 2 + 3, 4.0 + 5 + 6 + 7])[:, None]
    for gradient, tensor, scale in ((dk, k, 1), (dv, v, 2)):
        assert gradient.shape == tensor.shape
        assert (gradient.float() == scale * expected).all()
    if into:
        assert dk is given[1]
        assert dv is given[2]


def test_parts_of_groups_and_of_wide_values_go_together(kernels):
    q, k, v = tensors(heads_q=8, heads_kv=2, head_dim=64, head_dim_v=512)

    def look(call):
        if type(call["spec"]) is BackwardSpec:
            fill(call["dk"], 4 * k.numel(), 1.0 + len(kernels.of(BackwardSpec)))

    kernels.look = look
    _, dk, _, _, _ = backward(q, k, v)
    first, second = kernels.of(BackwardSpec)
    assert first["parts"] == second["parts"] == 4
    assert second["dv"] - first["dv"] == 2 * 256
    assert (dk == 4 * (2.0 + 3.0)).all()


# Empty problems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_kv": 0}], ids=str
)
def test_empty_problems_launch_nothing_and_have_gradients_of_zero(kernels, sizes):
    q, k, v = tensors(**sizes)
    qv = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    into = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
    for options in ({}, {"into": into}):
        *gradients, dsink, dqv = backward(q, k, v, **options)
        for gradient, tensor in zip(gradients, (q, k, v), strict=True):
            assert gradient.shape == tensor.shape
            assert (gradient == 0).all()
        assert dsink is dqv is None
    *_, dqv = backward(*tensors(**sizes, head_dim=64), qv=qv[..., :64].contiguous())
    assert (dqv == 0).all()
    assert not kernels.calls
    assert not kernels.specs, "nothing is compiled for them"


def test_without_keys_a_sink_is_the_lse_and_has_its_gradient(kernels):
    q, k, v = tensors(seqlen_k=0)
    sink, dlse = torch.randn(4), torch.randn(2, 4, 100)
    *_, dsink, _ = backward(q, k, v, sink=sink, dlse=dlse)
    torch.testing.assert_close(dsink, dlse.sum((0, 2)))
    *_, dsink, _ = backward(q, k, v, sink=sink)
    assert not dsink.any()


def test_a_sink_of_minus_infinity_is_none(kernels):
    sink = torch.tensor([-math.inf, 1.0, -math.inf, 0.0])
    dlse = torch.randn(2, 4, 100)
    *_, dsink, _ = backward(*tensors(seqlen_k=0), sink=sink, dlse=dlse)
    torch.testing.assert_close(dsink, dlse.sum((0, 2)) * torch.tensor([0.0, 1.0, 0.0, 1.0]))
    q, k, v = tensors()
    dout, out, lse = results_of(q, v)
    lse[:, 0, :50] = -math.inf
    *_, dsink, _ = backward(q, k, v, given=(dout, out, lse), sink=sink, dlse=dlse)
    assert dsink[0] == dsink[2] == 0.0


@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
def test_rows_that_only_a_mask_mod_hides_reach_no_kernel_whatever_they_hold(kernels, with_sink):
    q, k, v = tensors()
    dout, out, lse = results_of(q, v)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sink else None
    # Some rows of the second head of each sequence: their LSE is the sink's, or that of nothing.
    lse[:, 1, 30:40] = -1.0 if with_sink else -math.inf
    q[:, 30:40, 1] = dout[:, 30:40, 1] = math.nan
    dlse = torch.zeros_like(lse)
    dlse[:, 1, 30:40] = math.nan
    seen = {}

    def look(call):
        if type(call["spec"]) is PrepareSpec:
            seen["dlse"] = memory(call["dlse"], dlse.numel(), dlse.dtype).view(dlse.shape).clone()
        elif type(call["spec"]) is BackwardSpec:
            seen.update((name, memory(call[name], q.numel(), q.dtype).view(q.shape).clone()) for name in ("q", "dout"))

    kernels.look = look
    prefix = mods.prefix_lm(torch.tensor([70, 80], dtype=torch.int32))
    *_, dsink, _ = backward(q, k, v, given=(dout, out, lse), dlse=dlse, mask_mod=prefix, sink=sink)
    assert (seen["q"][:, 30:40, 1] == 0).all()
    assert (seen["dout"][:, 30:40, 1] == 0).all()
    assert not seen["dlse"].any()
    assert torch.equal(seen["q"][:, :, 0], q[:, :, 0]), "other rows are what they were"
    # The gradient of their LSE is the sink's alone.
    assert dsink is None or dsink.isnan().tolist() == [False, True, False, False]
