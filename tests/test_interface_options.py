"""Options of the public function: what reaches a backend, values and gradients both ways, and refusals."""

from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fa3
from fa3 import backends, interface
from fa3.backends import tiled
from fa3.block_masks import create_block_mask
from fa3.mods import MaskMod, ScoreMod, alibi, alibi_slopes, document
from fa3.options import Options


def own_parity(batch, head, q_index, kv_index):
    return (kv_index + q_index) % 2 == 0


def second(score, batch, head, q_index, kv_index, one, other):
    return score * other.sum()


def first(batch, head, q_index, kv_index, one, other):
    return kv_index >= 0 * one.sum()


ALIBI = alibi(alibi_slopes(4))
PARITY = MaskMod("interface_mods:own_parity", own_parity)
DOCUMENT = document(torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [2] * 3], dtype=torch.int32))
SINK = torch.tensor([0.5, -1.0, 3.0, 0.0])
QV = torch.linspace(-2, 2, 2 * 7 * 4 * 24).cos().view(2, 7, 4, 24)
BLOCKS = create_block_mask(DOCUMENT, 2, None, 7, 10)


@pytest.fixture
def qkv():
    return torch.randn(2, 7, 4, 16), torch.randn(2, 10, 2, 16), torch.randn(2, 10, 2, 24)


class ByOperator(TorchDispatchMode):
    """Lets no call take the way past the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


GIVEN = {
    "a window": {"window_size": (3, 1)},
    "a causal window": {"window_size": (2, 5), "causal": True},
    "chunks": {"attention_chunk": 4},
    "a softcap": {"softcap": 0.5},
    "a sink": {"sink": SINK},
    "qv": {"qv": QV},
    "a score_mod": {"score_mod": ALIBI},
    "a mask_mod": {"mask_mod": PARITY, "causal": True},
    "hints": {"pack_gqa": True, "sm_margin": 3},
    "all": {
        "window_size": (5, 3), "attention_chunk": 6, "softcap": 2.0, "sink": SINK, "qv": QV, "pack_gqa": False,
        "sm_margin": 1, "score_mod": ALIBI, "mask_mod": DOCUMENT, "softmax_scale": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_every_option_gives_what_the_oracle_gives_either_way(qkv, given):
    hints = ("pack_gqa", "sm_margin")
    expected = fa3.reference(*qkv, **{name: x for name, x in given.items() if name not in hints})
    plain = fa3.flash_attn_func(*qkv, **given, return_lse=True)
    with ByOperator():
        by_operator = fa3.flash_attn_func(*qkv, **given, return_lse=True)
        assert torch.equal(fa3.flash_attn_func(*qkv, **given), plain[0])
    for one, other, oracle in zip(plain, by_operator, expected, strict=True):
        torch.testing.assert_close(one.double(), oracle, rtol=1e-5, atol=1e-5)
        assert torch.equal(one, other)


def test_a_block_mask_is_its_mask_mod_either_way(qkv):
    expected = fa3.flash_attn_func(*qkv, mask_mod=DOCUMENT, sink=SINK)
    assert torch.equal(fa3.flash_attn_func(*qkv, block_mask=BLOCKS, sink=SINK), expected)
    with ByOperator():
        assert torch.equal(fa3.flash_attn_func(*qkv, block_mask=BLOCKS, sink=SINK), expected)


@pytest.fixture
def calls(monkeypatch):
    """What a stand-in for the backend is called with, beyond q, k, v and the scale."""
    seen = []

    def backend(q, k, v, softmax_scale, *rest):
        seen.append(rest)
        return "out", "lse"

    monkeypatch.setattr(interface, "forward_for", lambda q: backend)
    return seen


@pytest.mark.parametrize(
    ("given", "causal", "options"),
    [
        ({"window_size": [3, 5]}, False, Options(3, 5)),
        ({"window_size": (np.int64(3), -1)}, False, Options(3)),
        ({"window_size": (3, 5), "causal": True}, True, Options(3)),
        ({"window_size": (3, 0)}, True, Options(3)),
        ({"window_size": (10**30, 1)}, False, Options(2**63 - 1, 1)),
        ({"attention_chunk": 4}, False, Options(attention_chunk=4)),
        ({"softcap": 30}, False, Options(softcap=30.0)),
        ({"pack_gqa": False}, False, Options(pack_gqa=False)),
        ({"pack_gqa": True, "window_size": (-1, 0)}, True, Options(pack_gqa=True)),
        ({"sm_margin": 8}, False, Options(sm_margin=8)),
        ({"deterministic": True}, False, Options(deterministic=True)),
        ({"sink": SINK}, False, Options(sink=SINK)),
        ({"s_aux": SINK}, False, Options(sink=SINK)),
        ({"qv": QV}, False, Options(qv=QV)),
        ({"score_mod": ALIBI, "mask_mod": PARITY}, False, Options(score_mod=ALIBI, mask_mod=PARITY)),
        ({"block_mask": BLOCKS}, False, Options(block_mask=BLOCKS)),
    ],
    ids=lambda value: repr(list(value)) if isinstance(value, dict) else "",
)
def test_the_backend_is_handed_what_was_asked_for(qkv, calls, given, causal, options):
    assert fa3.flash_attn_func(*qkv, **given) == "out"
    assert calls == [(causal, False, options)]
    assert type(calls[0][2].softcap) is float


@pytest.mark.parametrize(
    "given",
    [
        {"window_size": (-1, 0)},
        {"window_size": [-1, 9], "causal": True},
        {"causal": True, "softcap": 0, "attention_chunk": np.int32(0), "sm_margin": np.int64(0)},
        {"causal": True, "num_splits": 0, "deterministic": False, "qv": None, "s_aux": None, "block_mask": None},
    ],
    ids=str,
)
def test_options_that_come_to_nothing_leave_a_plain_call(qkv, calls, given):
    fa3.flash_attn_func(*qkv, **given)
    assert calls == [(True, False)]


def test_parameters_and_frozen_options_take_the_direct_way(qkv, calls):
    sink = torch.nn.Parameter(SINK)
    with torch.no_grad():
        fa3.flash_attn_func(*qkv, sink=sink)
    frozen = torch.nn.Parameter(SINK, requires_grad=False)
    fa3.flash_attn_func(*qkv, sink=frozen)
    assert [options.sink for _, _, options in calls] == [sink, frozen]


@pytest.mark.parametrize("name", ["sink", "qv"])
def test_a_negative_view_among_the_options_reaches_the_backend_with_its_sign(qkv, monkeypatch, name):
    value = {"sink": SINK, "qv": QV}[name]
    expected = fa3.flash_attn_func(*qkv, **{name: value})

    def backend(*arguments):
        assert not getattr(arguments[6], name).is_neg()
        return tiled.forward(*arguments)

    for module in (interface, backends):
        monkeypatch.setattr(module, "forward_for", lambda q: backend)
    assert torch.equal(fa3.flash_attn_func(*qkv, **{name: torch._neg_view(-value)}), expected)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_two_names_of_one_sink_are_refused(qkv):
    with pytest.raises(TypeError, match="sink and s_aux are both given"):
        fa3.flash_attn_func(*qkv, sink=SINK, s_aux=SINK)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sink": [0.5] * 4}, TypeError, r"^sink must be a torch\.Tensor, not list"),
        ({"s_aux": 1.0}, TypeError, r"^s_aux must be a torch\.Tensor, not float"),
        ({"qv": QV.numpy()}, TypeError, r"^qv must be a torch\.Tensor, not ndarray"),
        ({"sink": SINK[:3]}, ValueError, r"^sink has shape \(3,\)"),
        ({"qv": QV[..., :16]}, ValueError, r"^qv has shape"),
        ({"score_mod": own_parity}, TypeError, r"^score_mod must be a fa3\.ScoreMod or None, not function"),
        ({"score_mod": PARITY}, TypeError, r"^score_mod must be a fa3\.ScoreMod or None, not MaskMod"),
        ({"mask_mod": ALIBI}, TypeError, r"^mask_mod must be a fa3\.MaskMod or None, not ScoreMod"),
        ({"block_mask": PARITY}, TypeError, r"^block_mask must be a fa3\.BlockMask or None, not MaskMod"),
        ({"block_mask": BLOCKS, "mask_mod": DOCUMENT}, ValueError, r"^block_mask and mask_mod are both given"),
        ({"block_mask": BLOCKS, "causal": True}, ValueError, r"^block_mask goes with no causal"),
        ({"block_mask": BLOCKS, "window_size": (3, -1)}, ValueError, r"^block_mask goes with no causal, window_size"),
        ({"block_mask": BLOCKS, "attention_chunk": 4}, ValueError, r"^block_mask goes with no .* attention_chunk"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("by_operator", [False, True])
def test_options_that_do_not_fit_are_named_either_way(qkv, given, error, words, by_operator):
    with ByOperator() if by_operator else nullcontext(), pytest.raises(error, match=words):
        fa3.flash_attn_func(*qkv, **given)


@pytest.mark.parametrize("wants", ["score_mod", "mask_mod"])
@pytest.mark.parametrize("others_want", [False, True])
def test_a_gradient_of_what_a_modification_reads_is_refused_by_name(qkv, wants, others_want):
    read = torch.ones(4), torch.randn(3, requires_grad=True)
    mod = {
        "score_mod": lambda: ScoreMod("interface_mods:second", second, read),
        "mask_mod": lambda: MaskMod("interface_mods:first", first, read[::-1]),
    }[wants]()
    qkv[0].requires_grad_(others_want)
    name = {"score_mod": r"score_mod\.aux\[1\]", "mask_mod": r"mask_mod\.aux\[0\]"}[wants]
    with pytest.raises(NotImplementedError, match=rf"^{name} requires a gradient.*detach it.*no_grad"):
        fa3.flash_attn_func(*qkv, **{wants: mod})
    with torch.no_grad():
        fa3.flash_attn_func(*qkv, **{wants: mod})


@pytest.mark.parametrize("others_want", [False, True])
def test_a_gradient_of_what_a_closure_carries_is_refused(qkv, others_want):
    slope = torch.ones((), requires_grad=True)
    mod = ScoreMod(f"interface_mods:sloped_{others_want}", lambda score, *index: score * slope)
    qkv[0].requires_grad_(others_want)
    with pytest.raises(NotImplementedError, match=r"sloped_.* reads a tensor that requires a gradient.*detach it"):
        fa3.flash_attn_func(*qkv, score_mod=mod)


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "wanted", [{"sink"}, {"qv"}, {"q", "sink"}, {"v", "qv"}, {"q", "k", "v", "sink", "qv"}], ids=str
)
def test_gradients_of_the_inputs_that_want_them_are_those_of_the_oracle(qkv, wanted, return_lse):
    inputs = {**dict(zip("qkv", qkv, strict=True)), "sink": SINK.clone(), "qv": QV.clone()}
    inputs = {name: x.double().requires_grad_(name in wanted) for name, x in inputs.items()}
    options = {"window_size": (4, 2), "softcap": 2.0}
    results = fa3.flash_attn_func(**inputs, **options, return_lse=return_lse)
    expected = fa3.reference(**inputs, **options)
    if not return_lse:
        results, expected = (results,), expected[:1]
    asked = [inputs[name] for name in sorted(wanted)]
    gradients, by_oracle = (
        torch.autograd.grad(sum(x.square().sum() for x in answers), asked) for answers in (results, expected)
    )
    torch.testing.assert_close(gradients, by_oracle)


def test_a_graph_may_be_walked_twice(qkv):
    sink = SINK.clone().requires_grad_()
    out = fa3.flash_attn_func(*qkv, sink=sink)
    first, second = (torch.autograd.grad(out.sum(), sink, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_second_derivative_by_a_sink_is_refused(qkv):
    sink = SINK.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fa3.flash_attn_func(*qkv, sink=sink).sum(), sink, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["sink", "qv"])
def test_a_forward_mode_derivative_by_an_option_is_refused(qkv, name):
    value = {"sink": SINK, "qv": QV}[name]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="dual tensor"):
        fa3.flash_attn_func(*qkv, **{name: forward_ad.make_dual(value, torch.ones_like(value))})


def loss(attend):
    return lambda sink, qv, q, k, v: attend(q, k, v, sink=sink, qv=qv, window_size=(3, 2)).square().sum()


def oracle(q, k, v, **options):
    return fa3.reference(q, k, v, **options)[0]


@pytest.mark.parametrize(
    "given", [{"score_mod": ALIBI, "mask_mod": PARITY}, {"block_mask": BLOCKS}], ids=["mods", "blocks"]
)
def test_torch_func_grad_is_the_gradient_through_modifications(qkv, given):
    inputs = [x.double() for x in qkv]
    dense = {"mask_mod": BLOCKS.mask_mod} if "block_mask" in given else given

    def loss_of(attend, given):
        return lambda q, k, v: attend(q, k, v, **given).square().sum()

    gradients = torch.func.grad(loss_of(fa3.flash_attn_func, given), (0, 1, 2))(*inputs)
    torch.testing.assert_close(gradients, torch.func.grad(loss_of(oracle, dense), (0, 1, 2))(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_over_gradients_through_a_modification(qkv):
    slopes = torch.stack([alibi_slopes(4), torch.zeros(4)])

    def gradient(attend):
        return lambda slopes: torch.func.grad(lambda q: attend(q, *qkv[1:], score_mod=alibi(slopes)).square().sum())(
            qkv[0]
        )

    mapped = torch.vmap(gradient(fa3.flash_attn_func))(slopes)
    for one, own in zip(mapped, slopes, strict=True):
        torch.testing.assert_close(one.double(), gradient(oracle)(own).double(), rtol=1e-5, atol=1e-5)


def test_torch_func_grad_is_the_gradient_by_options_too(qkv):
    inputs = [x.double() for x in (SINK, QV, *qkv)]
    gradients = torch.func.grad(loss(fa3.flash_attn_func), (0, 1, 4))(*inputs)
    torch.testing.assert_close(gradients, torch.func.grad(loss(oracle), (0, 1, 4))(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_over_sinks_and_over_their_gradients(qkv):
    sinks = torch.stack([SINK, SINK + 1, SINK * 2]).double()
    rest = [x.double() for x in (QV, *qkv)]
    mapped = torch.vmap(torch.func.grad(loss(fa3.flash_attn_func)), (0, None, None, None, None))(sinks, *rest)
    for one, sink in zip(mapped, sinks, strict=True):
        torch.testing.assert_close(one, torch.func.grad(loss(oracle))(sink, *rest))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_maps_over_what_a_modification_reads(qkv):
    slopes = torch.stack([alibi_slopes(4), torch.zeros(4)])
    mapped = torch.vmap(lambda one: fa3.flash_attn_func(*qkv, score_mod=alibi(one)))(slopes)
    assert torch.equal(mapped[0], fa3.flash_attn_func(*qkv, score_mod=ALIBI))
    torch.testing.assert_close(mapped[1], fa3.flash_attn_func(*qkv))


def test_a_sink_of_a_layer_is_trained(qkv):
    """Softmax off by one: the sink learns to take what the keys should not have."""
    sink = torch.nn.Parameter(torch.zeros(4))
    before = fa3.flash_attn_func(*qkv, sink=sink).square().sum()
    before.backward()
    with torch.no_grad():
        sink -= 0.5 * sink.grad
        assert fa3.flash_attn_func(*qkv, sink=sink).square().sum() < before


def test_meta_tensors_with_options_have_shapes(qkv):
    q, k, v = (x.to("meta").requires_grad_() for x in qkv)
    sink, qv = (x.to("meta").requires_grad_() for x in (SINK, QV))
    out = fa3.flash_attn_func(q, k, v, sink=sink, qv=qv, attention_chunk=3)
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v, sink, qv)] == [x.shape for x in (q, k, v, sink, qv)]


@pytest.mark.parametrize(
    ("softcap", "message"),
    [(10**400, "too large for a float"), (Fraction(10**400, 3), "too large"), (Fraction(1, 10**400), "too small")],
    ids=["int", "fraction", "tiny"],
)
def test_a_softcap_that_is_no_float_is_refused_by_name(softcap, message):
    q = torch.randn(1, 4, 2, 64)
    with pytest.raises(ValueError, match=f"softcap is {message}"):
        fa3.flash_attn_func(q, q, q, softcap=softcap)
