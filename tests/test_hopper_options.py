"""What the hopper backend hands to a kernel for a call with options, with a recorder in the kernel's place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fa3 import mods
from fa3.backends import hopper
from fa3.mods import MaskMod, ScoreMod
from fa3.options import Options
from fa3.plan import H200, make_spec, usual_tiles
from problems import problem_of
from recorder import (
    block_mask,
    forward,
    install,
    keep_key,
    keep_score,
    memory,
    options_of_every_kind,
    strides_of,
    tensors,
)


@pytest.fixture
def kernel(monkeypatch):
    return install(monkeypatch)


# Windows and caps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "extras"),
    [
        ({"window_left": 10, "window_right": 5}, (10, 5, 0)),
        ({"window_left": 0, "window_right": 0}, (0, 0, 0)),
        # Open sides are as long as the sequences.
        ({"window_left": 10}, (10, 100, 0)),
        ({"window_right": 5}, (130, 5, 0)),
        ({"window_left": 10, "causal": True}, (10, 0, 0)),
        ({"window_left": 10, "window_right": 7, "causal": True}, (10, 0, 0)),
        ({"attention_chunk": 7}, (130, 100, 7)),
        ({"attention_chunk": 7, "causal": True}, (130, 0, 7)),
        ({"attention_chunk": 7, "window_left": 3, "window_right": 2}, (3, 2, 7)),
        # So is a window wider than they are.
        ({"window_left": 10**9, "window_right": 5}, (130, 5, 0)),
        ({"window_left": 10, "window_right": 10**9}, (10, 100, 0)),
    ],
    ids=str,
)
def test_windows_go_to_their_kernel_with_open_sides_as_long_as_the_sequences(kernel, options, extras):
    forward(*tensors(), **options)
    assert kernel.last["spec"].mask == "window"
    assert kernel.last["extras"] == extras


def test_a_window_or_chunk_that_hides_nothing_goes_to_the_kernel_without_one(kernel):
    for options, causal in itertools.product(
        ({"window_left": 129, "window_right": 99}, {"attention_chunk": 130}), (False, True)
    ):
        forward(*tensors(), causal=causal, **options)
        assert kernel.last["spec"].mask == ("causal" if causal else "full")
        assert kernel.last["extras"] is None


def test_a_chunk_is_no_longer_than_both_sequences(kernel):
    # Queries before the first key have a chunk without keys, however long it is.
    forward(*tensors(seqlen_q=100, seqlen_k=50), attention_chunk=10**9)
    assert kernel.last["extras"] == (50, 100, 150)


def test_a_cap_is_an_argument_and_not_part_of_the_kernel(kernel):
    for softcap in (5.0, 30.0):
        forward(*tensors(), softcap=softcap)
        assert kernel.last["extras"] == (softcap,)
    assert kernel.specs[0] == kernel.specs[1]
    assert kernel.specs[0].softcap


# Tensors of options -----------------------------------------------------------------------------------------------


def test_qv_is_read_where_it_lies_and_widens_the_default_scale(kernel):
    q, k, v = tensors(head_dim=64, head_dim_v=128)
    qv = torch.randn(2, 4, 100, 160).to(q.dtype)[..., 16:144].transpose(1, 2)
    forward(q, k, v, qv=qv)
    assert kernel.last["extras"] == (qv.data_ptr(), *qv.stride()[:3])
    assert kernel.last["softmax_scale"] == pytest.approx((64 + 128) ** -0.5)
    assert kernel.last["spec"].qv


@pytest.mark.parametrize("fault", ["stride", "address"])
def test_a_qv_that_tma_cannot_read_is_copied(kernel, fault):
    q, k, v = tensors()
    wide = torch.randn(2, 100, 4, 130 if fault == "stride" else 136).to(q.dtype)
    qv = wide[..., 2:130] if fault == "stride" else wide[..., 1:129]
    seen = []
    kernel.look = lambda call: seen.append(memory(call["extras"][0], qv.numel(), q.dtype))
    forward(q, k, v, qv=qv)
    address, *strides = kernel.last["extras"]
    assert address % 16 == 0
    assert strides == [100 * 4 * 128, 4 * 128, 128]
    assert torch.equal(seen[0].view(qv.shape), qv)


def test_tensors_of_modifications_are_addresses_and_sizes(kernel):
    slopes, ids = torch.randn(4), torch.zeros(2, 130, dtype=torch.int32)
    forward(*tensors(), score_mod=mods.alibi(slopes), mask_mod=mods.document(ids))
    assert kernel.last["extras"] == (slopes.data_ptr(), 4, ids.data_ptr(), 2, 130)
    spec = kernel.last["spec"]
    assert (spec.score_mod, spec.score_aux) == ("fa3.kernels.mods:alibi", "f1")
    assert (spec.mask_mod, spec.mask_aux) == ("fa3.kernels.mods:document", "i2")


def test_modifications_may_read_two_tensors_or_none(kernel):
    first, second = torch.zeros(3, 4, 5), torch.zeros(7, dtype=torch.int32)
    forward(*tensors(), score_mod=ScoreMod("one:score", keep_score, (first, second)))
    assert kernel.last["extras"] == (first.data_ptr(), 3, 4, 5, second.data_ptr(), 7)
    assert kernel.last["spec"].score_aux == "f3,i1"
    forward(*tensors(), score_mod=ScoreMod("one:score", keep_score), mask_mod=MaskMod("one:mask", keep_key))
    assert kernel.last["extras"] is None


def test_another_tensor_of_the_same_shape_is_read_by_the_next_call(kernel):
    q, k, v = tensors()
    for _ in range(2):
        slopes = torch.randn(4)
        forward(q, k, v, score_mod=mods.alibi(slopes))
        assert kernel.last["extras"] == (slopes.data_ptr(), 4)
    assert len(kernel.specs) == 1, "the call was remembered"


@pytest.mark.parametrize(
    ("sizes", "strides"), [((2, 4), (8, 2)), ((1, 4), (0, 2)), ((2, 1), (2, 0)), ((1, 1), (0, 0))], ids=str
)
def test_block_masks_are_stepped_over_in_blocks_of_queries_or_shared(kernel, sizes, strides):
    mask = block_mask(*sizes, seqlen_q=200, seqlen_k=300)
    forward(*tensors(seqlen_q=200, seqlen_k=300), block_mask=mask)
    assert kernel.last["extras"] == (mask.counts.data_ptr(), mask.indices.data_ptr(), *strides, 3)
    spec = kernel.last["spec"]
    assert (spec.mask, spec.mask_mod, spec.mask_aux) == ("blocks", "one:mask", "")


def test_tensors_of_the_mask_of_a_block_mask_come_before_its_lists(kernel):
    ids = torch.zeros(2, 130, dtype=torch.int32)
    mask = block_mask(aux=(ids,))
    forward(*tensors(), block_mask=mask)
    assert kernel.last["extras"][:3] == (ids.data_ptr(), 2, 130)
    assert kernel.last["extras"][3:5] == (mask.counts.data_ptr(), mask.indices.data_ptr())


def test_options_without_arguments_of_their_own_have_none(kernel):
    for options in ({}, {"sink": torch.zeros(4)}, {"pack_gqa": True}, {"sm_margin": 20}):
        forward(*tensors(), **options)
        assert kernel.last["extras"] is None


def test_extra_arguments_of_all_combinations_are_those_that_the_kernel_expects(kernel):
    pytest.importorskip("cutlass")
    from cutlass import Float32, Int32, Int64

    from fa3.kernels.forward import extra_types

    kinds = options_of_every_kind()
    combinations = [c for n in range(len(kinds) + 1) for c in itertools.combinations(kinds, n)]
    calls = [{key: value for name in chosen for key, value in kinds[name].items()} for chosen in combinations]
    # Block masks go with all but windows and masks.
    with_blocks = [{**options, "block_mask": block_mask()} for options in calls]
    calls += [c for c in with_blocks if "window_left" not in c and "mask_mod" not in c]
    assert len(calls) == 64 + 16
    for options in calls:
        forward(*tensors(), **options)
        types = [kind for _, kinds in extra_types(kernel.last["spec"]) for kind in kinds]
        extras = kernel.last["extras"] or ()
        assert len(extras) == len(types), options
        for value, kind in zip(extras, types, strict=True):
            assert type(value) is (float if kind is Float32 else int)
            # Addresses need 64 bits; sizes, bounds and strides of lists fit into 32.
            assert kind in (Float32, Int64) or (kind is Int32 and abs(value) < 2**31)
        names = [name for name, _ in extra_types(kernel.last["spec"])]
        places = {"window": 0, "softcap": 1, "qv": 2, "score_aux": 3, "mask_aux": 4, "blocks": 5}
        assert names == sorted(names, key=places.__getitem__)
    everything = {key: value for name in kinds for key, value in kinds[name].items()}
    forward(*tensors(), **everything)
    bias, ids, qv = everything["score_mod"].aux[0], everything["mask_mod"].aux[0], everything["qv"]
    assert kernel.last["extras"] == (
        *(10, 100, 0),
        5.0,
        *(qv.data_ptr(), *qv.stride()[:3]),
        *(bias.data_ptr(), 4, 9),
        *(ids.data_ptr(), 2, 130),
    )


# Sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_that_the_kernel_can_read_is_read_where_it_lies(kernel, dtype):
    sink = torch.randn(4).to(dtype)
    forward(*tensors(), sink=sink)
    assert kernel.last["sink"] == sink.data_ptr()
    assert kernel.last["sink_bytes"] == sink.element_size()


@pytest.mark.parametrize(
    ("sink", "readable"),
    [
        (torch.randn(4).half(), torch.float32),
        (torch.randn(8)[::2], torch.float32),
        (torch.randn(8).bfloat16()[::2], torch.bfloat16),
        (torch.randn(8).half()[::2], torch.float32),
        (torch.randn(1).bfloat16().expand(4), torch.bfloat16),
    ],
    ids=["half", "strided", "strided-bfloat16", "strided-half", "expanded"],
)
def test_another_sink_is_copied_into_one_that_it_can(kernel, sink, readable):
    seen = []
    kernel.look = lambda call: seen.append(memory(call["sink"], 4, readable))
    forward(*tensors(), sink=sink)
    assert kernel.last["sink"] != sink.data_ptr()
    assert kernel.last["sink_bytes"] == readable.itemsize
    assert torch.equal(seen[0], sink.to(readable))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_keys_the_lse_is_the_sink(kernel, dtype):
    sink = torch.tensor([0.5, -math.inf, 3.0, -2.0]).to(dtype)
    q, k, v = tensors(seqlen_k=0)
    for _ in range(2):  # and so it is for a remembered call
        out, lse = forward(q, k, v, sink=sink, lse=True)
        assert not out.any()
        assert lse.dtype == torch.float32
        assert torch.equal(lse, sink.float()[None, :, None].expand(2, 4, 100))
    assert not kernel.calls
    assert torch.equal(forward(q, k, v, window_left=3, lse=True)[1], torch.full((2, 4, 100), -math.inf))


# Packed heads, free multiprocessors, wide values ------------------------------------------------------------------


def test_packed_heads_are_launched_as_heads_of_tiles(kernel):
    q, k, v = tensors(batch=3, seqlen_q=100, heads_q=8, heads_kv=2)
    out, _ = forward(q, k, v, pack_gqa=True)
    spec = kernel.last["spec"]
    assert spec.pack_gqa
    assert (kernel.last["heads_q"], kernel.last["heads_kv"]) == (8, 2)
    assert kernel.last["blocks"] == math.ceil(100 * 4 / spec.tile_m) * 2 * 3
    assert kernel.last["levels"] == math.ceil(100 * 4 / spec.tile_m)
    assert strides_of(kernel.last, "q") == strides_of(kernel.last, "out") == out.stride()[:3]


def test_multiprocessors_are_left_free(kernel):
    q, k, v = tensors(batch=8, seqlen_q=2000, heads_q=8, heads_kv=8)
    for sm_margin in (0, 30):
        forward(q, k, v, sm_margin=sm_margin)
        assert kernel.last["blocks"] == H200.sm_count - sm_margin


@pytest.mark.parametrize(("head_dim_v", "parts"), [(512, [256, 256]), (264, [256, 8]), (384, [256, 128])])
def test_a_wide_v_is_computed_in_parts_of_its_columns(kernel, head_dim_v, parts):
    q, k, v = tensors(head_dim=64, head_dim_v=head_dim_v)
    out, lse = forward(q, k, v, lse=True, causal=True, window_left=9, softcap=3.0, sink=torch.zeros(4))
    assert out.shape == (2, 100, 4, head_dim_v)
    assert [call["head_dim_v"] for call in kernel.calls] == parts
    for number, call in enumerate(kernel.calls):
        # 256 columns of two bytes further each time.
        assert call["v"] == v.data_ptr() + 512 * number
        assert call["out"] == out.data_ptr() + 512 * number
        assert strides_of(call, "v") == v.stride()[:3]
        assert strides_of(call, "out") == out.stride()[:3]
        assert call["lse"] == lse.data_ptr()
        assert call["extras"] == (9, 0, 0, 3.0)
    assert len(kernel.specs) == 1
    assert (kernel.specs[0].head_dim, kernel.specs[0].head_dim_v) == (64, 256)


def test_a_wide_v_at_an_unaligned_address_is_copied_once_for_all_its_parts(kernel):
    q, k, v = tensors(head_dim=64, head_dim_v=512)
    storage = torch.zeros(v.numel() + 8).to(v.dtype)
    unaligned = storage[1 : 1 + v.numel()].view(v.shape)
    for given_v in (v, unaligned):
        hopper.forward(q, k, given_v, None, False, False)
    first, second = kernel.calls[2:]
    assert first["v"] % 16 == 0
    assert second["v"] == first["v"] + 512
    assert strides_of(first, "v") == strides_of(second, "v") == v.stride()[:3]


def test_lengths_beyond_what_the_kernel_counts_are_refused(kernel):
    def call(seqlen_q, seqlen_k, **options):
        q, k = (torch.zeros(1, 1, 1, 64).half().expand(1, n, 1, 64) for n in (seqlen_q, seqlen_k))
        forward(q, k, k, **options)

    with pytest.raises(ValueError, match=f"seqlen_k={2**31}: the hopper backend takes at most {hopper.MAX_SEQLEN}"):
        call(1, 2**31)
    # Positions of a window are sums of both lengths.
    call(1, hopper.MAX_SEQLEN)
    with pytest.raises(ValueError, match=rf"seqlen_q=2, seqlen_k={hopper.MAX_SEQLEN}, .*: with a window .* in all"):
        call(2, hopper.MAX_SEQLEN, window_left=5)
    # The end of a chunk may lie a whole chunk behind the last key.
    with pytest.raises(ValueError, match="attention_chunk=1500000000: with a window or chunks"):
        call(1, 2 * 10**9, attention_chunk=15 * 10**8)


# Given specs ------------------------------------------------------------------------------------------------------


def with_spec(spec, sizes=None, **options):
    return hopper.forward_with_spec(spec, *tensors(**(sizes or {})), options=Options(**options) if options else None)


def spec_for(mask="full", **changes):
    problem = problem_of(**changes)
    features = {name: changes[name] for name in ("softcap", "qv", "score_mod", "mask_mod") if name in changes}
    if "softcap" in features:
        features["softcap"] = True
    return make_spec("bf16", 128, mask, usual_tiles(problem), **features)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (spec_for(), {"window_left": 5}),
        (spec_for(), {"softcap": 5.0}),
        (spec_for(), {"qv": torch.zeros(2, 100, 4, 128).bfloat16()}),
        (spec_for(), {"score_mod": ScoreMod("one:score", keep_score)}),
        (spec_for(), {"mask_mod": MaskMod("one:mask", keep_key)}),
        (spec_for(), {"block_mask": block_mask()}),
        (spec_for("causal"), {"window_left": 5}),
        (spec_for("causal"), {"attention_chunk": 5}),
        (spec_for(softcap=5.0), {}),
        (spec_for(qv=True), {}),
        (spec_for(score_mod="one:score"), {}),
        (spec_for(score_mod="other:score"), {"score_mod": ScoreMod("one:score", keep_score)}),
        (spec_for(score_mod="one:score"), {"score_mod": ScoreMod("one:score", keep_score, (torch.zeros(4),))}),
        (spec_for(mask_mod="one:mask"), {}),
        (spec_for("blocks", mask_mod="one:mask"), {"mask_mod": MaskMod("one:mask", keep_key)}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value.name,
)
def test_a_spec_for_other_options_is_refused(kernel, spec, options):
    spec.validate()
    with pytest.raises(ValueError, match=rf"spec {spec.name} cannot compute a problem with Problem\("):
        with_spec(spec, **options)
    assert not kernel.specs


@pytest.mark.parametrize(
    "sizes",
    [{"head_dim": 64}, {"head_dim": 256}, {"head_dim_v": 256, "head_dim": 64}, {"dtype": torch.float16}],
    ids=str,
)
def test_a_spec_for_other_dims_or_another_dtype_is_refused(kernel, sizes):
    with pytest.raises(ValueError, match="cannot compute"):
        with_spec(spec_for(), sizes)


def test_a_problem_without_a_kernel_has_none_with_a_spec_either(kernel):
    with pytest.raises(NotImplementedError, match="dtype fp32"):
        with_spec(spec_for(), {"dtype": torch.float32})


def test_a_kernel_of_windows_computes_a_plain_call_and_one_with_a_window(kernel):
    spec = spec_for("window", window_left=5)
    for options, extras in (({}, (130, 100, 0)), ({"window_left": 7, "window_right": 0}, (7, 0, 0))):
        with_spec(spec, **options)
        assert kernel.last["extras"] == extras
    assert kernel.specs == [spec, spec]
