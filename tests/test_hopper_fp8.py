"""How the hopper backend launches e4m3, with a recorder in the place of its kernels."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import recorder
from fa3 import mods, quantization
from fa3.backends import hopper
from fa3.options import Fp8, Options
from fa3.plan import H200, kernel_of
from fa3.problem import check_forward
from fa3.spec import TransposeSpec
from recorder import OF_ONE_CALL, strides_of

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def kernel(monkeypatch):
    return recorder.install(monkeypatch)


def tensors(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return recorder.tensors(**{"dtype": E4M3, **sizes})


def forward(*call: Tensor, fp8: Fp8 | None = None, causal: bool = False, **options: Any) -> Tensor:
    return hopper.forward(*call, None, causal, False, Options(fp8=fp8, **options))[0]


def head_scales(**changes: Any) -> Fp8:
    """A scale for each K/V head, the layout of each another."""
    scales = {
        "q_scale": torch.rand(2, 2),
        "k_scale": torch.rand(2, 2).t(),
        "v_scale": torch.rand(2, 2, 3)[:, :, 1],
    }
    return Fp8(**{**scales, **changes})


def block_scales(**changes: Any) -> Fp8:
    """Those of blocks of 64 queries and 128 keys, for 100 queries of 4 heads and 130 keys of 2."""
    scales = {
        "q_scale": torch.rand(2, 4, 2),
        "k_scale": torch.rand(2, 2, 2),
        "v_scale": torch.rand(2, 2, 2),
        "v_scale_max": torch.rand(2, 2),
        "q_block": 64,
        "k_block": 128,
    }
    return Fp8(**{**scales, **changes})


def transposed(v: Tensor) -> Tensor:
    return quantization.transposed(v)


def place_of(scale: Tensor, *strides: int) -> tuple[int, ...]:
    return (scale.data_ptr(), *strides)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_out_has_the_dtype_that_is_asked_for_and_one_element_takes_two_bytes(kernel, name):
    q, k, v = tensors()
    out = forward(q, k, v, fp8=Fp8(out_dtype=name))
    assert out.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert out.shape == q.shape
    assert kernel.last["spec"].out_dtype == name
    assert strides_of(kernel.last, "out") == (100 * 4 * 128, 4 * 128, 128)


@pytest.mark.parametrize("options", [None, Options(), Options(fp8=Fp8())], ids=["none", "plain", "fp8"])
def test_without_scales_addresses_are_zero(kernel, options):
    hopper.forward(*tensors(), None, False, False, options)
    assert kernel.last["extras"] == (*(0,) * 16, 1, 1)


def test_scales_are_read_where_they_lie(kernel):
    fp8 = head_scales()
    forward(*tensors(), fp8=fp8)
    q, k, v = fp8.q_scale, fp8.k_scale, fp8.v_scale
    expected = (*place_of(q, 2, 1, 0), *place_of(k, 1, 2, 0), *place_of(v, 6, 3, 0), 0, 0, 0, 0)
    # One scale for the two query heads of a group; rows of a block of queries do not matter.
    assert kernel.last["extras"] == (*expected, 1, 2)


def test_a_query_head_may_have_a_scale_of_its_own(kernel):
    forward(*tensors(), fp8=head_scales(q_scale=torch.rand(2, 4)))
    assert kernel.last["extras"][-2:] == (1, 1)


def test_scales_of_blocks_come_with_the_largest_and_the_rows_of_a_block_of_queries(kernel):
    fp8 = block_scales()
    forward(*tensors(), fp8=fp8)
    expected = [number for scale, strides in zip(fp8.tensors, ((8, 2, 1), (4, 2, 1), (4, 2, 1), (2, 1, 0)), strict=True)
                for number in place_of(scale, *strides)]  # fmt: skip
    assert kernel.last["extras"] == (*expected, 64, 1)
    assert kernel.last["spec"].key_block == 128


def test_a_scale_of_v_that_is_expanded_to_all_blocks_of_a_head_is_one_a_head(kernel):
    of_blocks, of_head = torch.rand(2, 2, 2), torch.rand(2, 2)
    expanded = of_head[..., None].expand(2, 2, 2)
    for v_scale, value_blocks in ((of_blocks, True), (expanded, False), (of_blocks[..., :1].expand(2, 2, 2), False)):
        forward(*tensors(), fp8=block_scales(v_scale=v_scale))
        assert kernel.last["spec"].value_blocks is value_blocks
        assert kernel.last["spec"].key_block == 128
        assert kernel.last["extras"][8:12] == place_of(v_scale, *v_scale.stride())


def test_a_pass_transposes_v_of_wide_heads_before_and_attention_reads_what_it_wrote(kernel, monkeypatch):
    passes = []

    def load(spec):
        if isinstance(spec, TransposeSpec):
            return lambda *arguments: passes.append(arguments)
        return recorder.Recorder.load(kernel, spec)

    monkeypatch.setattr(kernel, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    q, k, v = (torch.empty(2, 2050, 8, 264, dtype=E4M3)[..., :256] for _ in range(3))
    forward(q, k, v, fp8=head_scales(q_scale=None, k_scale=None, v_scale=torch.rand(2, 8)))
    ((read, written, _, *sizes, strides),) = passes
    assert read % 16 == 0
    assert (sizes, kernel.last["v"]) == ([2, 2050, 8, 256], written)
    # 264 bytes a row are no multiple of 16: a copy was read.
    assert strides == (2050 * 8 * 256, 8 * 256, 256)
    # (batch, column, head) of V^T, with 2064 slots.
    assert strides_of(kernel.last, "v") == (8 * 256 * 2064, 2064, 256 * 2064)
    assert kernel.last["extras"][8:12] == (*kernel.last["extras"][8:9], 8, 1, 0)
    assert not kernel.last["spec"].transpose_stages
    # A call of the same kind is remembered.
    planned = len(kernel.specs)
    forward(q, k, v, fp8=head_scales(q_scale=None, k_scale=None, v_scale=torch.rand(2, 8)))
    assert (len(passes), len(kernel.specs)) == (2, planned)


def test_scales_come_behind_all_other_extra_arguments(kernel):
    bias = torch.zeros(4, 9)
    fp8 = head_scales()
    forward(*tensors(), fp8=fp8, window_left=10, softcap=5.0, score_mod=mods.relative_bias(bias))
    extras = kernel.last["extras"]
    assert extras[:7] == (10, 100, 0, 5.0, bias.data_ptr(), 4, 9)
    assert extras[7:9] == (fp8.q_scale.data_ptr(), 2)
    assert len(extras) == 7 + 18
    mask = recorder.block_mask()
    forward(*tensors(), fp8=fp8, block_mask=mask)
    extras = kernel.last["extras"]
    assert extras[:2] == (mask.counts.data_ptr(), mask.indices.data_ptr())
    assert extras[5:7] == (fp8.q_scale.data_ptr(), 2)


def test_the_extra_arguments_are_those_of_the_kernel(kernel):
    pytest.importorskip("cutlass")
    from fa3.kernels.parts.extras import extra_types

    mask = {"block_mask": recorder.block_mask()}
    for options in (
        {},
        {"window_left": 10},
        {"softcap": 5.0, "score_mod": mods.relative_bias(torch.zeros(4, 9))},
        mask,
    ):
        for fp8 in (None, head_scales(), block_scales()):
            forward(*tensors(), fp8=fp8, **options)
            types = [kind for _, kinds in extra_types(kernel.last["spec"]) for kind in kinds]
            assert len(kernel.last["extras"]) == len(types)


def test_strides_of_transposed_v_are_those_of_columns(kernel):
    q, k, v = tensors(head_dim_v=64)
    turned = transposed(v)
    out = forward(q, k, turned, fp8=Fp8(v_transposed=True))
    assert turned.shape == (2, 2, 64, 144)
    assert out.shape == (2, 100, 4, 64)
    assert strides_of(kernel.last, "v") == (2 * 64 * 144, 144, 64 * 144)
    assert kernel.last["spec"].transpose_stages == 0
    assert kernel.last["head_dim_v"] == 64
    forward(q, k, v)
    assert strides_of(kernel.last, "v") == (130 * 2 * 64, 2 * 64, 64)
    assert kernel.last["spec"].transpose_stages > 0


def test_a_copy_of_transposed_v_has_strides_of_columns(kernel):
    q, k, v = tensors(head_dim_v=64)
    turned = transposed(v)
    seen = []
    kernel.look = lambda call: seen.append(recorder.memory(call["v"], turned.numel(), torch.uint8))
    flat = torch.empty(turned.numel() + 1, dtype=E4M3)
    unaligned = next(part for part in (flat[:-1], flat[1:]) if part.data_ptr() % 16).view(turned.shape)
    strided = torch.empty(2, 2, 64, 145, dtype=E4M3)[..., :144]
    for x in (unaligned, strided):
        x.copy_(turned)
        forward(q, k, x, fp8=Fp8(v_transposed=True))
        assert strides_of(kernel.last, "v") == (2 * 64 * 144, 144, 64 * 144)
        assert torch.equal(seen[-1], turned.view(torch.uint8).flatten())


def test_rows_at_multiples_of_16_bytes_are_read_where_they_lie_and_others_are_copied(kernel):
    packed = torch.randn(2, 100, 3, 4, 64).to(E4M3)
    q, k, v = packed.unbind(2)
    forward(q, k, v)
    assert [kernel.last[name] for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert strides_of(kernel.last, "q") == (100 * 3 * 4 * 64, 3 * 4 * 64, 64)
    # 8 elements of 16 bits would do.
    q = torch.randn(2, 100, 4, 72).to(E4M3)[..., :64]
    forward(q, k, v)
    assert kernel.last["q"] != q.data_ptr()
    assert strides_of(kernel.last, "q") == (100 * 4 * 64, 4 * 64, 64)


def test_a_dim_of_one_has_a_stride_that_tma_takes(kernel):
    forward(*tensors(batch=1, heads_q=1, heads_kv=1))
    assert strides_of(kernel.last, "q") == (16, 128, 16)


def test_no_key_or_nothing_to_compute_launches_nothing(kernel):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_kv": 0}):
        q, k, v = tensors(**sizes)
        for fp8, v_given in ((Fp8(), v), (Fp8(v_transposed=True, out_dtype="fp16"), transposed(v))):
            out = forward(q, k, v_given, fp8=fp8)
            assert out.shape == q.shape
            assert out.dtype is (torch.float16 if fp8.v_transposed else torch.bfloat16)
            assert not out.any()
    assert not kernel.calls


@pytest.mark.parametrize(
    "change",
    [
        {"q_scale": None},
        {"q_scale": torch.rand(2, 4)},
        {"k_scale": torch.rand(2, 2)},
        {"v_scale": torch.rand(2, 2)},
        {"out_dtype": "fp16"},
        {"two_level": True},
    ],
    ids=str,
)
def test_calls_that_differ_in_what_goes_with_e4m3_are_remembered_apart(kernel, change):
    q, k, v = tensors()
    fp8 = head_scales()
    forward(q, k, v, fp8=fp8)
    forward(q, k, v, fp8=fp8._replace(**change))
    assert len(kernel.specs) == 2
    first, second = ({name: x for name, x in call.items() if name not in OF_ONE_CALL} for call in kernel.calls)
    assert first != second


def test_a_call_with_other_scales_of_the_same_layout_is_the_same_call_at_other_addresses(kernel):
    q, k, v = tensors()
    first, second = head_scales(), head_scales()
    for fp8 in (first, second):
        forward(q, k, v, fp8=fp8)
    assert len(kernel.specs) == 1
    addresses = [[call["extras"][place] for place in (0, 4, 8)] for call in kernel.calls]
    assert addresses == [[x.data_ptr() for x in fp8.tensors[:3]] for fp8 in (first, second)]


def test_a_kernel_of_another_layout_or_dtype_is_refused(kernel):
    q, k, v = tensors()
    options = Options(fp8=Fp8())
    _, spec = kernel_of(check_forward(q, k, v, None, False, False, options), H200)
    hopper.forward_with_spec(spec, q, k, v, options=options)
    for change in ({"out_dtype": "fp16"}, {"key_block": 128, "tile_n": 64}, {"transpose_stages": 0}, {"dtype": "bf16"}):
        with pytest.raises(ValueError, match="cannot compute a problem"):
            hopper.forward_with_spec(replace(spec, **change), q, k, v, options=options)
