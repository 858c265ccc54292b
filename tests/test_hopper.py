"""What the hopper backend hands to a kernel, with a recorder in the kernel's place: no GPU is needed."""

from __future__ import annotations

import contextlib
import inspect
import math

import pytest
import torch

import fa3
from fa3.backends import hopper
from fa3.plan import H200
from fa3.presets import shipped_specs
from recorder import NAMES, OF_ONE_CALL, SIZES, install, strides_of, tensors


@pytest.fixture
def kernel(monkeypatch):
    return install(monkeypatch)


def test_the_recorder_takes_the_arguments_of_the_kernel():
    pytest.importorskip("cutlass")
    from fa3.kernels.forward import ForwardKernel

    parameters = list(inspect.signature(ForwardKernel.__call__).parameters)[1:]
    assert [name.replace("extra_numbers", "extras") for name in parameters] == list(NAMES)


def test_the_kernel_gets_sizes_strides_and_addresses_of_what_it_reads(kernel):
    q, k, v = tensors()
    out, lse = hopper.forward(q, k, v, None, False, True)
    call = kernel.last
    assert [call[name] for name in ("q", "k", "v", "out", "lse")] == [x.data_ptr() for x in (q, k, v, out, lse)]
    assert [call[name] for name in SIZES] == [2, 100, 130, 4, 2, 128, 128]
    assert strides_of(call, "q") == (100 * 4 * 128, 4 * 128, 128)
    assert strides_of(call, "v") == (130 * 2 * 128, 2 * 128, 128)
    assert strides_of(call, "out") == strides_of(call, "q")
    assert call["softmax_scale"] == pytest.approx(1 / math.sqrt(128))
    assert (call["sink"], call["extras"]) == (0, None)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 100)


def test_without_lse_there_is_no_tensor_for_it(kernel):
    out, lse = hopper.forward(*tensors(), None, False, False)
    assert lse is None
    assert kernel.last["lse"] == 0
    assert out.is_contiguous()


def test_views_are_read_where_they_lie(kernel):
    packed = torch.randn(2, 100, 3, 4, 64).to(torch.float16)
    q, k, v = packed.unbind(2)
    hopper.forward(q, k, v, None, True, False)
    assert kernel.last["k"] == k.data_ptr()
    assert strides_of(kernel.last, "k") == (100 * 3 * 4 * 64, 3 * 4 * 64, 64)


def test_expanded_dims_keep_their_stride_of_zero(kernel):
    q, k, v = tensors()
    k = k[:, :, :1].expand(2, 130, 2, 128)
    hopper.forward(q, k, v, None, False, False)
    assert kernel.last["k"] == k.data_ptr()
    assert strides_of(kernel.last, "k") == (130 * 2 * 128, 2 * 128, 0)


def test_the_stride_of_a_dim_of_size_one_does_not_matter(kernel):
    q, _, _ = tensors(batch=1, seqlen_q=1, heads_q=1)
    q = q.as_strided((1, 1, 1, 128), (3, 5, 7, 1))
    _, k, v = tensors(batch=1, heads_kv=1)
    hopper.forward(q, k, v, None, False, False)
    assert kernel.last["q"] == q.data_ptr()
    assert all(stride % 8 == 0 for stride in strides_of(kernel.last, "q"))


def test_strides_that_tma_cannot_take_are_copied_away(kernel):
    q, _k, v = tensors()
    crooked = torch.randn(2, 130, 2, 130).to(torch.bfloat16)[..., :128]
    hopper.forward(q, crooked, v, None, False, False)
    assert kernel.last["k"] != crooked.data_ptr()
    assert strides_of(kernel.last, "k") == (130 * 2 * 128, 2 * 128, 128)


def test_an_unaligned_address_is_copied_and_an_aligned_one_of_the_same_shape_is_not(kernel):
    q, k, v = tensors()
    storage = torch.randn(k.numel() + 8).to(torch.bfloat16)
    unaligned = storage[1 : 1 + k.numel()].view(k.shape)
    for other in (k, unaligned, k):
        hopper.forward(q, other, v, None, False, False)
    assert len(kernel.specs) == 1  # one key: the same shapes and strides
    first, second, third = kernel.calls
    assert first["k"] == third["k"] == k.data_ptr()
    assert second["k"] not in (k.data_ptr(), unaligned.data_ptr())
    assert second["k"] % 16 == 0
    assert strides_of(second, "k") == strides_of(first, "k")


def test_a_repeated_call_is_not_planned_again(kernel, monkeypatch):
    q, k, v = tensors()
    hopper.forward(q, k, v, None, False, False)
    monkeypatch.setattr(hopper, "check_forward", lambda *_: pytest.fail("checked again"))
    hopper.forward(q + 1, k, v, None, False, True)
    assert len(kernel.calls) == 2


@pytest.mark.parametrize(
    "change",
    [{"causal": True}, {"softmax_scale": 0.5}, {"dtype": torch.float16}, {"seqlen_q": 99}, {"heads_kv": 4}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_launch_is_part_of_the_key(kernel, change):
    def call(softmax_scale=None, causal=False, **sizes):
        hopper.forward(*tensors(**sizes), softmax_scale, causal, False)

    call()
    call(**change)
    assert len(kernel.specs) == 2
    first, second = ({k: v for k, v in one.items() if k not in OF_ONE_CALL} for one in kernel.calls)
    assert first != second


def test_empty_problems_launch_nothing(kernel):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_kv": 0}):
        q, k, v = tensors(**sizes)
        out, lse = hopper.forward(q, k, v, None, False, True)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == -math.inf).all()
    assert not kernel.calls


def test_a_problem_without_a_kernel_names_the_way_out(kernel):
    with pytest.raises(
        NotImplementedError, match=r"dtype fp32: kernels exist for fp16, bf16, e4m3; set FA3_BACKEND=tiled"
    ):
        hopper.forward(*tensors(dtype=torch.float32), None, False, False)
    assert not kernel.specs


def test_a_spec_for_another_problem_is_refused(kernel):
    (spec,) = shipped_specs("smoke")
    with pytest.raises(ValueError, match=spec.name):
        hopper.forward_with_spec(spec, *tensors(head_dim=64))


def test_calls_on_one_stream_share_a_counter_and_others_do_not(kernel, monkeypatch):
    q, k, v = tensors()
    for stream in (0, 0, 7):
        monkeypatch.setattr(hopper, "_current_stream", lambda device, stream=stream: stream)
        hopper.forward(q, k, v, None, False, False)
    first, second, third = (call["counter"] for call in kernel.calls)
    assert first == second != third


def test_a_captured_call_gets_a_counter_of_its_own(kernel, monkeypatch):
    q, k, v = tensors()
    hopper.forward(q, k, v, None, False, False)
    monkeypatch.setattr(hopper, "_capturing", lambda: True)
    hopper.forward(q, k, v, None, False, False)
    assert kernel.calls[0]["counter"] != kernel.calls[1]["counter"]
    assert len(hopper._counters) == 1


def test_the_memory_of_launches_does_not_grow_forever(kernel, monkeypatch):
    monkeypatch.setattr(hopper, "MAX_REMEMBERED", 4)
    for seqlen in range(1, 12):
        hopper.forward(*tensors(seqlen_q=seqlen), None, False, False)
    assert len(hopper._launches) <= 4


def test_no_launch_has_more_blocks_than_tiles_or_multiprocessors(kernel):
    for batch, seqlen_q, heads in ((1, 1, 1), (1, 193, 4), (3, 5000, 8)):
        q, k, v = tensors(batch=batch, seqlen_q=seqlen_q, heads_q=heads, heads_kv=heads)
        hopper.forward(q, k, v, None, True, False)
        tiles = math.ceil(seqlen_q / kernel.specs[-1].tile_m) * heads * batch
        assert 1 <= kernel.last["blocks"] <= min(tiles, H200.sm_count)


def test_a_call_on_another_device_than_the_current_one_launches_there(kernel, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index):
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(hopper, "_current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device", device)
    streams = []
    monkeypatch.setattr(hopper, "_current_stream", lambda index: streams.append(index) or 0)
    hopper.forward(*tensors(), None, False, False)
    assert entered == [-1, "left"]  # -1 is what a CPU tensor says of its device
    assert streams == [-1]
    assert len(kernel.calls) == 1


@pytest.mark.parametrize("stream", [2, 7], ids=["per-thread", "another"])
def test_only_the_default_stream_shares_a_counter(kernel, monkeypatch, stream):
    monkeypatch.setattr(hopper, "_current_stream", lambda device: stream)
    kept = []  # as a kernel in flight would keep the memory
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: kept.append(zeros(*size, **options)) or kept[-1])
    for _ in range(2):
        hopper.forward(*tensors(), None, False, False)
    assert kernel.calls[0]["counter"] != kernel.calls[1]["counter"]
    assert not hopper._counters


def test_a_given_spec_does_not_excuse_from_checks(kernel):
    (spec,) = shipped_specs("smoke")
    q, k, v = tensors()
    hopper.forward_with_spec(spec, q, k, v)
    with pytest.raises(TypeError, match="dtype"):
        hopper.forward_with_spec(spec, q, k.half(), v)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_named_before_anybody_asks_for_their_strides(kernel, monkeypatch, layout):
    monkeypatch.setattr("fa3.interface.forward_for", lambda q: hopper.forward)
    q, k, v = tensors(batch=1, heads_q=1, heads_kv=1)
    sparse = getattr(q if layout == "to_sparse" else q[0, 0], layout)()
    with pytest.raises(ValueError, match=r"q has layout torch\.sparse"):
        fa3.flash_attn_func(sparse, k, v)
