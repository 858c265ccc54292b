"""Which backend computes a call, without any GPU."""

import pytest
import torch

import fa3
from fa3 import backends
from fa3.backends import hopper, hopper_backward, sdpa, tiled
from fa3.mods import ScoreMod, alibi, alibi_slopes
from fa3.options import Options
from fa3.problem import Problem


def problem(**changes):
    fields = {
        "batch": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "head_dim_v": 64,
        "dtype": "bf16",
        "softmax_scale": 0.125,
    }
    return Problem(**{**fields, **changes})


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that CUDA devices of a capability exist."""

    def pretend(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    return pretend


CPU = torch.device("cpu")


def test_a_cpu_gets_the_tiled_backend():
    assert backends.choose(problem(), CPU) == "tiled"
    assert backends.backend_reason(problem(), CPU) == "tiled: device cpu is no NVIDIA GPU"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "tiled"), ((8, 0), "sdpa"), ((8, 9), "sdpa"), ((9, 0), "hopper"), ((10, 0), "sdpa"), ((12, 0), "sdpa")],
)
def test_a_gpu_gets_the_backend_of_its_capability(gpu, capability, name):
    device = gpu(*capability)
    assert backends.choose(problem(), device) == name
    reason = backends.backend_reason(problem(), device)
    assert reason.startswith(f"{name}: device cuda:0 has compute capability {capability[0]}.{capability[1]}")


def test_a_rocm_gpu_is_no_hopper(gpu, monkeypatch):
    device = gpu(9, 0)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert backends.choose(problem(), device) == "tiled"


NOT_FOR_FLASH_ATTENTION_2 = [
    ({"dtype": "fp32"}, "dtype fp32"),
    ({"head_dim_v": 128}, "head_dim 64 beside head_dim_v 128"),
    ({"batch": 70_000}, "batch 70000"),
    ({"window_left": 3}, "window_size or attention_chunk"),
    ({"window_right": 1}, "window_size or attention_chunk"),
    ({"attention_chunk": 4}, "window_size or attention_chunk"),
    ({"softcap": 30.0}, "softcap 30.0"),
    ({"sink": True}, "a sink"),
    ({"qv": True}, "qv"),
    ({"score_mod": "module:function"}, "score_mod"),
    ({"mask_mod": "module:function"}, "mask_mod"),
    ({"mask_mod": "module:function", "block_sparse": True}, "block_mask"),
]


@pytest.mark.parametrize(("change", "words"), NOT_FOR_FLASH_ATTENTION_2)
def test_what_flash_attention_2_cannot_take_goes_to_tiled(gpu, change, words):
    device = gpu(8, 0)
    assert words in sdpa.why_not(problem(**change))
    assert backends.choose(problem(**change), device) == "tiled"
    assert words in backends.backend_reason(problem(**change), device)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [8, 72, 128, 256])
def test_flash_attention_2_takes_short_dtypes_of_any_head_dim(dtype, head_dim):
    assert sdpa.why_not(problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)) is None


@pytest.mark.parametrize("change", [{"window_left": 6}, {"pack_gqa": True}, {"sm_margin": 8}], ids=str)
def test_flash_attention_2_takes_options_that_change_no_result(change):
    assert sdpa.why_not(problem(**change)) is None


@pytest.mark.parametrize(("change", "words"), NOT_FOR_FLASH_ATTENTION_2)
def test_nothing_falls_from_hopper_to_another_backend(gpu, change, words):
    assert backends.choose(problem(**change), gpu(9, 0)) == "hopper"


@pytest.mark.parametrize("name", ["hopper", "sdpa", "tiled"])
def test_the_variable_forces_a_backend(gpu, monkeypatch, name):
    monkeypatch.setenv("FA3_BACKEND", name)
    assert backends.choose(problem(), gpu(9, 0)) == name
    assert backends.backend_reason(problem(), gpu(9, 0)) == f"{name}: forced by FA3_BACKEND"


def test_a_forced_sdpa_does_not_fall_to_tiled(gpu, monkeypatch):
    monkeypatch.setenv("FA3_BACKEND", "sdpa")
    assert backends.choose(problem(dtype="fp32"), gpu(8, 0)) == "sdpa"
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match="sdpa backend cannot take dtype fp32; FA3_BACKEND=tiled can"):
        sdpa.forward(q, q, q)


def test_an_unforced_sdpa_leaves_the_rest_to_tiled():
    q = torch.randn(1, 3, 2, 8)
    assert torch.equal(sdpa.forward(q, q, q)[0], tiled.forward(q, q, q)[0])


def test_an_unforced_sdpa_leaves_options_to_tiled_and_a_forced_one_refuses_them(monkeypatch):
    q = torch.randn(1, 30, 2, 8).half()
    options = Options(window_left=4, window_right=2, softcap=3.0, sink=torch.randn(2), score_mod=alibi(alibi_slopes(2)))
    results = (backend.forward(q, q, q, None, False, True, options) for backend in (sdpa, tiled))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    monkeypatch.setenv("FA3_BACKEND", "sdpa")
    with pytest.raises(NotImplementedError, match="sdpa backend cannot take window_size or attention_chunk"):
        sdpa.forward(q, q, q, None, False, True, options)


@pytest.mark.parametrize("seqlen_k", [0, 3])
def test_sdpa_answers_empty_problems_without_the_operator(seqlen_k):
    q = torch.randn(1, 5 if seqlen_k == 0 else 0, 2, 8).half()
    k = torch.randn(1, seqlen_k, 2, 8).half()
    out, lse = sdpa.forward(q, k, k, None, True, True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("causal", "options"),
    [(True, None), (True, Options(window_left=9)), (False, Options(window_left=9, window_right=0))],
    ids=["causal", "causal in a wide window", "a window that is causal"],
)
def test_sdpa_repairs_the_rows_without_keys(monkeypatch, causal, options):
    """The operator runs on GPUs only: a stand-in with its conventions shows what is done around it."""

    def operator(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        assert causal is True
        assert (cu_q, cu_k, max_q, max_k, dropout, debug) == (None, None, 5, 3, 0.0, False)
        out, lse = fa3.reference(q, k, v, causal=causal, softmax_scale=scale)
        out[:, :2] = torch.nan
        return out.to(q.dtype), lse.float().masked_fill(lse == -torch.inf, torch.inf), None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    q, k, v = torch.randn(2, 5, 4, 8).half(), torch.randn(2, 3, 2, 8).half(), torch.randn(2, 3, 2, 8).half()
    out, lse = sdpa.forward(q, k, v, 0.4, causal, True, options)
    expected_out, expected_lse = tiled.forward(q, k, v, 0.4, True, True)
    torch.testing.assert_close(out, expected_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse)


def test_sdpa_copies_only_what_is_not_aligned():
    aligned = torch.zeros(2, 4, 2, 8).half()
    assert sdpa._aligned(aligned) is aligned
    assert sdpa._aligned(aligned[:1, :, :1].expand(2, -1, -1, -1)).stride(0) == 0
    flat = torch.arange(2 * 4 * 2 * 8 + 1).half()
    shifted = flat[1:].view(2, 4, 2, 8)
    odd = torch.zeros(2, 4, 2, 12).half()[..., :8]
    for tensor in (shifted, odd):
        copy = sdpa._aligned(tensor)
        assert copy.data_ptr() % 16 == 0
        assert copy.stride() == (64, 16, 8, 1)
        assert torch.equal(copy, tensor)


def test_an_unknown_name_is_a_value_error(monkeypatch):
    monkeypatch.setenv("FA3_BACKEND", "cuda")
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match="FA3_BACKEND='cuda': allowed are hopper, sdpa, tiled"):
        fa3.flash_attn_func(q, q, q)


@pytest.mark.parametrize(("name", "capability"), [("hopper", "9.0"), ("sdpa", "8.0")])
def test_a_cpu_tensor_with_a_forced_gpu_backend_says_so(monkeypatch, name, capability):
    monkeypatch.setenv("FA3_BACKEND", name)
    q = torch.randn(1, 3, 2, 8)
    words = f"FA3_BACKEND={name}, but device cpu is no NVIDIA GPU: .* capability {capability}"
    with pytest.raises(fa3.BackendError, match=words):
        fa3.flash_attn_func(q, q, q)
    with pytest.raises(fa3.BackendError, match=words):
        fa3.flash_attn_func(q.requires_grad_(), q, q)


def test_hopper_forced_on_another_gpu_says_which(gpu, monkeypatch):
    monkeypatch.setenv("FA3_BACKEND", "hopper")
    with pytest.raises(fa3.BackendError, match=r"cuda:0 has compute capability 8\.0"):
        backends.choose(problem(), gpu(8, 0))


def test_the_variable_is_read_at_every_call(monkeypatch):
    q = torch.randn(1, 3, 2, 8)
    fa3.flash_attn_func(q, q, q)
    monkeypatch.setenv("FA3_BACKEND", "hopper")
    with pytest.raises(fa3.BackendError):
        fa3.flash_attn_func(q, q, q)
    monkeypatch.setenv("FA3_BACKEND", "tiled")
    fa3.flash_attn_func(q, q, q)
    monkeypatch.setenv("FA3_BACKEND", "")
    fa3.flash_attn_func(q, q, q)


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the backward of the hopper backend: has kernels for fp16 alone, and notes what it is asked."""
    asked = []

    def why_no_backward(problem):
        asked.append(problem)
        return None if problem.dtype == "fp16" else f"dtype {problem.dtype}"

    def backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, options=None, into=None):
        asked.append(options)
        return tiled.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, options, into)

    monkeypatch.setattr(hopper_backward, "why_no_backward", why_no_backward)
    monkeypatch.setattr(hopper_backward, "backward", backward)
    monkeypatch.setattr(hopper, "forward", tiled.forward)
    monkeypatch.setattr(backends, "for_device", lambda device: "hopper")
    monkeypatch.setattr(backends, "_lacking", {})
    return asked


def call(dtype=torch.float16, **options):
    """Gradients of a call whose every input wants one."""
    q, k, v = (torch.randn(1, 5, heads, 8).to(dtype).requires_grad_() for heads in (2, 1, 1))
    out = fa3.flash_attn_func(q, k, v, **options)
    return torch.autograd.grad(out.sum(), (q, k, v))


@pytest.mark.parametrize("name", ["tiled", "sdpa"])
def test_gradients_of_other_backends_come_from_tiled(monkeypatch, name):
    monkeypatch.setattr(backends, "for_device", lambda device: name)
    q = torch.randn(1, 5, 2, 8)
    assert backends.backward_for(q, q, q, None, False) is tiled.backward


def test_a_hopper_gpu_has_gradients_from_its_own_kernels(kernels, recwarn):
    call()
    described, options = kernels
    assert (described.dtype, described.heads_q, described.return_lse) == ("fp16", 2, True)
    assert options is None
    assert not recwarn.list


def test_what_the_hopper_kernels_lack_is_left_to_tiled_with_a_warning(kernels):
    with pytest.warns(UserWarning, match="hopper backend has no backward kernel for this call, dtype fp32: the tiled"):
        gradients = call(torch.float32)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert [type(answer) for answer in kernels] == [Problem]


def test_a_score_mod_without_a_derivative_is_left_to_tiled_and_one_with_it_is_not(kernels, recwarn):
    call(score_mod=alibi(alibi_slopes(2)))
    assert not recwarn.list
    assert kernels[-1].score_mod.derivative
    own = ScoreMod("backend_mods:doubled", lambda score, *index: score * 2)
    with pytest.warns(UserWarning, match=r"no backward kernel for this call, score_mod 'backend_mods:doubled' without"):
        call(score_mod=own)
    assert isinstance(kernels[-1], Problem)


def test_plain_calls_of_one_shape_are_described_once_and_others_each_time(kernels):
    for _ in range(3):
        call()
    assert sum(isinstance(answer, Problem) for answer in kernels) == 1
    kernels.clear()
    for cap in (1.0, 2.0, 1.0):
        call(softcap=cap)
    assert [answer.softcap for answer in kernels if isinstance(answer, Problem)] == [1.0, 2.0, 1.0]


def test_what_is_remembered_of_plain_calls_does_not_grow_forever(kernels, monkeypatch):
    monkeypatch.setattr(backends, "_MAX_REMEMBERED", 3)
    for length in range(1, 9):
        q = torch.randn(1, length, 2, 8).half()
        assert backends.backward_for(q, q, q, None, False) is hopper_backward.backward
        assert len(backends._lacking) <= 3


@pytest.mark.parametrize("by", ["argument", "torch", "both"])
def test_determinism_is_asked_of_the_backward_by_the_call_or_by_torch(kernels, by):
    options = {"deterministic": by != "torch"}
    try:
        torch.use_deterministic_algorithms(by != "argument")
        call(**options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels[-1] == Options(deterministic=True)


def test_torchs_determinism_counts_when_gradients_are_computed(kernels):
    q = torch.randn(1, 5, 2, 8).half().requires_grad_()
    out = fa3.flash_attn_func(q, q, q, softcap=2.0)
    try:
        torch.use_deterministic_algorithms(True)
        torch.autograd.grad(out.sum(), q, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels[-1] == Options(softcap=2.0, deterministic=True)
    torch.autograd.grad(out.sum(), q)
    assert kernels[-1] == Options(softcap=2.0)


def test_the_backend_of_a_gpu_is_looked_up_once_for_gradients_too(monkeypatch):
    class OnGpu:
        is_cuda = True
        device = torch.device("cuda", 0)

        def get_device(self):
            return 0

    asked = []
    monkeypatch.setattr(backends, "for_device", lambda device: asked.append(device) or "sdpa")
    monkeypatch.setattr(backends, "_name_of_gpu", {})
    for _ in range(3):
        assert backends.backward_for(OnGpu(), None, None, None, False) is tiled.backward
    assert asked == [OnGpu.device]
