"""What the hopper backend hands to a kernel, with a recorder in the kernel's place: no GPU is needed."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

import fa3
from fa3 import plan as planning
from fa3.backends import hopper
from fa3.plan import H200

NAMES = (
    *("q", "k", "v", "out", "lse", "counter", "stream"),
    *("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_kv", "head_dim", "head_dim_v"),
    *(f"{tensor}_{stride}_stride" for tensor in ("q", "k", "v", "out") for stride in ("batch", "row", "head")),
    *("softmax_scale", "section", "levels", "blocks"),
)


class Recorder:
    """A store whose kernels write down their arguments."""

    def __init__(self):
        self.specs = []
        self.calls = []

    def load(self, spec):
        self.specs.append(spec)
        return lambda *arguments: self.calls.append(dict(zip(NAMES, arguments, strict=True)))

    @property
    def last(self):
        return self.calls[-1]


@pytest.fixture
def kernel(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(hopper, "default_store", lambda: recorder)
    monkeypatch.setattr(hopper, "device_facts", lambda device: H200)
    monkeypatch.setattr(hopper, "_current_device", lambda: -1)  # what a CPU tensor says of its device
    monkeypatch.setattr(hopper, "_current_stream", lambda device: 0)
    monkeypatch.setattr(hopper, "_capturing", lambda: False)
    monkeypatch.setattr(hopper, "_launches", {})
    monkeypatch.setattr(hopper, "_streams", {})
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    return recorder


def tensors(batch=2, seqlen_q=100, seqlen_k=130, heads_q=4, heads_kv=2, head_dim=128, dtype=torch.bfloat16):
    return (
        torch.randn(batch, seqlen_q, heads_q, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype),
        torch.randn(batch, seqlen_k, heads_kv, head_dim).to(dtype),
    )


def strides_of(call, tensor):
    return tuple(call[f"{tensor}_{stride}_stride"] for stride in ("batch", "row", "head"))


def test_the_kernel_gets_sizes_strides_and_addresses_of_what_it_reads(kernel):
    q, k, v = tensors()
    out, lse = hopper.forward(q, k, v, None, False, True)
    call = kernel.last
    assert [call[name] for name in ("q", "k", "v", "out", "lse")] == [x.data_ptr() for x in (q, k, v, out, lse)]
    assert [call[name] for name in NAMES[7:14]] == [2, 100, 130, 4, 2, 128, 128]
    assert strides_of(call, "q") == (100 * 4 * 128, 4 * 128, 128)
    assert strides_of(call, "v") == (130 * 2 * 128, 2 * 128, 128)
    assert strides_of(call, "out") == strides_of(call, "q")
    assert call["softmax_scale"] == pytest.approx(1 / math.sqrt(128))
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
    addresses = ("q", "k", "v", "out", "lse", "counter", "stream")
    first, second = ({k: v for k, v in one.items() if k not in addresses} for one in kernel.calls)
    assert first != second or kernel.specs[0] != kernel.specs[1]


def test_empty_problems_launch_nothing(kernel):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_kv": 0}):
        q, k, v = tensors(**sizes)
        out, lse = hopper.forward(q, k, v, None, False, True)
        assert out.shape == q.shape
        assert not out.any()
        assert (lse == -math.inf).all()
    assert not kernel.calls


def test_a_problem_without_a_kernel_names_the_way_out(kernel):
    q, k, v = tensors(head_dim=96)
    with pytest.raises(NotImplementedError, match=r"head_dim=96.*FA3_BACKEND=tiled"):
        hopper.forward(q, k, v, None, False, False)
    with pytest.raises(NotImplementedError, match="fp32"):
        hopper.forward(*tensors(dtype=torch.float32), None, False, False)


def test_a_spec_for_another_problem_is_refused(kernel):
    (spec,) = planning.shipped_specs("smoke")
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
    assert len(hopper._streams) == 1


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


def test_the_per_thread_default_stream_shares_no_counter(kernel, monkeypatch):
    monkeypatch.setattr(hopper, "_current_stream", lambda device: hopper.PER_THREAD_STREAM)
    kept = []  # as a kernel in flight would keep the memory
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: kept.append(zeros(*size, **options)) or kept[-1])
    for _ in range(2):
        hopper.forward(*tensors(), None, False, False)
    assert kernel.calls[0]["counter"] != kernel.calls[1]["counter"]
    assert not hopper._streams


def test_a_given_spec_does_not_excuse_from_checks(kernel):
    (spec,) = planning.shipped_specs("smoke")
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
