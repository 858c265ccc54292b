"""Gradients of the tiled backend, with every option: against autograd of the oracle, and as PyTorch asks for them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fa3
from eager import LargestTensor
from fa3.backends import tiled
from fa3.block_masks import create_block_mask
from fa3.mods import MaskMod, ScoreMod, alibi, alibi_slopes, document, relative_bias
from fa3.options import Options
from oracle_gradients import assert_gradients_accurate, oracle_gradients


def tensors(batch=2, seqlen_q=9, seqlen_k=11, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=16, dtype=torch.float64):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=torch.float64).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=torch.float64).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=torch.float64).to(dtype)
    return q, k, v


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 queries and 8 keys, so that small problems cross many tile edges."""
    monkeypatch.setattr(tiled, "_tile_sizes", lambda problem, device: (2, 4, 8))


# Modifications: of the caller's own, whose names are never imported -------------------------------------------------


def bend(score, batch, head, q_index, kv_index, factors, offsets):
    """Not linear in the score, and different for every index."""
    return score * factors[batch, head].sigmoid() + 0.1 * score.sin() * offsets[q_index % 5] - 0.05 * (kv_index % 7)


def hide_some(score, batch, head, q_index, kv_index):
    return score.masked_fill((q_index + kv_index + head) % 3 == 0, -math.inf) * 1.5


def sieve(batch, head, q_index, kv_index, numbers):
    return (numbers[batch] * kv_index + head + q_index) % 3 != 0


def no_key_for_odd_queries(batch, head, q_index, kv_index):
    return q_index % 2 == 0


def score_mod_of(kind, batch, heads):
    return {
        "alibi": lambda: alibi(alibi_slopes(heads)),
        "relative_bias": lambda: relative_bias(torch.randn(heads, 7)),
        "bend": lambda: ScoreMod(
            "gradient_mods:bend", bend, (torch.randn(batch, heads), torch.arange(5, dtype=torch.int32))
        ),
        "hide_some": lambda: ScoreMod("gradient_mods:hide_some", hide_some),
        None: lambda: None,
    }[kind]()


def mask_mod_of(kind, batch, length):
    return {
        "document": lambda: document(
            torch.randint(0, 3, (batch, length), dtype=torch.int32).sort(dim=1).values, causal=True
        ),
        "sieve": lambda: MaskMod("gradient_mods:sieve", sieve, (torch.randint(0, 9, (batch,), dtype=torch.int32),)),
        "rows": lambda: MaskMod("gradient_mods:no_key_for_odd_queries", no_key_for_odd_queries),
        None: lambda: None,
    }[kind]()


# Against the oracle -------------------------------------------------------------------------------------------------


def by_backend(dout, dlse, q, k, v, out, lse, softmax_scale=None, causal=False, window_size=(-1, -1), **options):
    """Gradients of the tiled backend, by the names of their inputs."""
    gradients = tiled.backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, Options(*window_size, **options))
    named = dict(zip(("q", "k", "v", "sink", "qv"), gradients, strict=True))
    return {name: gradient for name, gradient in named.items() if gradient is not None}


def forward(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), **options):
    return tiled.forward(q, k, v, softmax_scale, causal, True, Options(*window_size, **options))


sizes = {
    "batch": st.integers(1, 3),
    "seqlen_q": st.integers(1, 20),
    "seqlen_k": st.integers(0, 30),
    "heads_kv": st.integers(1, 2),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from([8, 24]),
    "head_dim_v": st.sampled_from([8, 40]),
}
masks = st.one_of(
    st.just({}),
    st.just({"causal": True}),
    st.builds(lambda *sides: {"window_size": sides}, st.integers(-1, 25), st.integers(-1, 25)),
    st.builds(lambda chunk: {"attention_chunk": chunk}, st.integers(1, 25)),
)


@settings(max_examples=80, deadline=None)
@given(
    **sizes,
    mask=masks,
    softcap=st.sampled_from([0.0, 2.0]),
    with_sink=st.booleans(),
    with_qv=st.booleans(),
    score_mod=st.sampled_from([None, "alibi", "relative_bias", "bend", "hide_some"]),
    mask_mod=st.sampled_from([None, "document", "sieve", "rows"]),
    in_blocks=st.booleans(),
    tile=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
def test_gradients_through_every_combination_of_options_are_those_of_the_oracle(
    batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, mask, softcap, with_sink, with_qv, score_mod,
    mask_mod, in_blocks, tile, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    heads = heads_kv * group
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v)
    options = {
        "softcap": softcap,
        "sink": torch.randn(heads, dtype=torch.float64) if with_sink else None,
        "qv": torch.randn(batch, seqlen_q, heads, head_dim_v, dtype=torch.float64) if with_qv else None,
        "score_mod": score_mod_of(score_mod, batch, heads),
    }
    mask_mod = mask_mod_of(mask_mod, batch, max(seqlen_q, seqlen_k))
    if in_blocks and mask_mod is not None:
        options["block_mask"] = create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k)
    else:
        options |= {"mask_mod": mask_mod, **mask}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_tile_sizes", lambda problem, device: tile)
        out, lse = forward(q, k, v, **options)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        gradients = by_backend(dout, dlse, q, k, v, out, lse, **options)
    expected = oracle_gradients(dout, dlse, q, k, v, **options)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: name + m)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    seqlen_q=st.integers(5, 70),
    seqlen_k=st.integers(10, 90),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([8, 40, 64]),
    head_dim_v=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    # Where a row sees one key, its gradients cancel to 0, and eager PyTorch may hit that by chance.
    mask=st.sampled_from([{}, {"causal": True}, {"window_size": (9, 5)}, {"attention_chunk": 12}]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sink=st.booleans(),
    with_qv=st.booleans(),
    score_mod=st.sampled_from([None, "alibi", "bend"]),
    seed=st.integers(0, 1000),
)
def test_gradients_of_short_dtypes_have_at_most_twice_the_error_of_eager_pytorch(
    batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, dtype, mask, softcap, with_sink, with_qv,
    score_mod, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    heads = heads_kv * group
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v, dtype)
    options = {
        **mask,
        "softcap": softcap,
        "sink": torch.randn(heads) if with_sink else None,
        "qv": torch.randn(batch, seqlen_q, heads, head_dim_v).to(dtype) if with_qv else None,
        "score_mod": score_mod_of(score_mod, batch, heads),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_tile_sizes", lambda problem, device: (1, 24, 32))
        out, lse = forward(q, k, v, **options)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        gradients = by_backend(dout, dlse, q, k, v, out, lse, **options)
    assert_gradients_accurate(gradients, dout, dlse, q, k, v, slack=4.0, **options)


# gradcheck ----------------------------------------------------------------------------------------------------------


def own_parity(batch, head, q_index, kv_index, numbers):
    return (kv_index + q_index + numbers[head]) % 2 == 0


PARITY = MaskMod("gradient_mods:own_parity", own_parity, (torch.arange(2, dtype=torch.int32),))
BEND = ScoreMod("gradient_mods:bend", bend, (torch.tensor([[0.5, -1.0]]), torch.arange(5, dtype=torch.int32)))

CHECKED = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "chunk": {"attention_chunk": 4},
    "softcap": {"softcap": 2.0, "causal": True},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "qv": {"qv": torch.linspace(-1, 1, 2 * 6 * 16).cos().view(1, 6, 2, 16)},
    "score_mod": {"score_mod": BEND, "causal": True},
    "mask_mod": {"mask_mod": PARITY, "window_size": (-1, 2)},
    "block_mask": {"block_mask": create_block_mask(PARITY, None, 2, 6, 9)},
    "all": {
        "causal": True, "window_size": (5, 0), "softcap": 3.0, "sink": torch.tensor([0.5, -1.0]),
        "qv": torch.linspace(-1, 1, 2 * 6 * 16).sin().view(1, 6, 2, 16), "score_mod": BEND, "mask_mod": PARITY,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKED)
def test_gradients_of_out_and_lse_pass_gradcheck(kind, small_tiles):
    options = dict(CHECKED[kind])
    leaves = [name for name in ("sink", "qv") if name in options]
    inputs = [*tensors(1, 6, 9, 2, 1, 8, 16), *(options.pop(name).double() for name in leaves)]

    def attend(q, k, v, *others):
        given = dict(zip(leaves, others, strict=True))
        out, lse = fa3.flash_attn_func(q, k, v, **options, **given, return_lse=True)
        # A LSE of -inf has no differences to take.
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs], fast_mode=True)


# Rows and keys that see nothing -------------------------------------------------------------------------------------

BLIND = {
    "a mask_mod": {"mask_mod": mask_mod_of("rows", 2, 11)},
    "a block mask": {"block_mask": create_block_mask(mask_mod_of("rows", 2, 11), None, None, 9, 11)},
    "a score_mod": {
        "score_mod": ScoreMod(
            "gradient_mods:hide_odd",
            lambda score, batch, head, q_index, kv_index: score.masked_fill(q_index % 2 == 1, -math.inf),
        )
    },
    "a capped score": {"mask_mod": mask_mod_of("rows", 2, 11), "softcap": 2.0, "score_mod": alibi(alibi_slopes(4))},
}


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("given", BLIND.values(), ids=BLIND)
def test_rows_that_see_nothing_give_and_get_no_gradient_whatever_they_hold(given, with_sink, small_tiles):
    q, k, v = tensors()
    options = {**given, "sink": torch.randn(4, dtype=torch.float64) if with_sink else None}
    out, lse = forward(q, k, v, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = by_backend(dout, dlse, q, k, v, out, lse, **options)
    assert (expected["q"][:, 1::2] == 0).all()
    q[:, 1::2] = dout[:, 1::2] = math.nan
    if not with_sink:
        dlse[:, :, 1::2] = math.nan
    out, lse = forward(q, k, v, **options)
    assert (out[:, 1::2] == 0).all()
    gradients = by_backend(dout, dlse, q, k, v, out, lse, **options)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_queries_before_the_first_key_write_zeros_and_read_nothing(small_tiles):
    q, k, v = tensors(seqlen_q=15, seqlen_k=4)
    out, lse = tiled.forward(q, k, v, None, True, True)
    q[:, :11] = math.nan
    into = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
    gradients = tiled.backward(torch.ones_like(out), None, q, k, v, out, lse, None, True, None, into)
    assert all(one is other for one, other in zip(gradients[:3], into, strict=True))
    assert (into[0][:, :11] == 0).all()
    assert all(torch.isfinite(x).all() for x in into)


@pytest.mark.parametrize("sizes", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"heads_q": 0}], ids=str)
def test_where_there_is_nothing_gradients_are_zero(sizes):
    q, k, v = tensors(**sizes)
    options = Options(sink=torch.randn(q.shape[2]), qv=torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype))
    out, lse = tiled.forward(q, k, v, None, True, True, options)
    into = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
    gradients = tiled.backward(torch.ones_like(out), None, q, k, v, out, lse, None, True, options, into)
    for gradient, of_input in zip(gradients, (q, k, v, options.sink, options.qv), strict=True):
        assert gradient.shape == of_input.shape
        assert (gradient == 0).all()


# Into memory that is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "all", "block_mask"])
def test_gradients_are_written_into_strided_views(kind, small_tiles):
    q, k, v = tensors(1, 6, 9, 2, 1, 8, 16)
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in CHECKED[kind].items()}
    causal, window_size = options.pop("causal", False), options.pop("window_size", (-1, -1))
    arguments = (None, causal, Options(*window_size, **options))
    out, lse = tiled.forward(q, k, v, *arguments[:2], True, arguments[2])
    rest = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *arguments)
    expected = tiled.backward(*rest)
    wide = [torch.full((*x.shape[:3], 40), math.nan, dtype=x.dtype) for x in (q, k, v)]
    into = tuple(one[..., 3 : 3 + x.shape[3]] for one, x in zip(wide, (q, k, v), strict=True))
    gradients = tiled.backward(*rest, into)
    for one, other, view in zip(gradients, expected, (*into, None, None), strict=True):
        assert view is None or one is view
        assert one is other or torch.equal(one, other)
    assert all(one[..., :3].isnan().all() and one[..., 19:].isnan().all() for one in wide)


# Twins --------------------------------------------------------------------------------------------------------------


def in_place(score, batch, head, q_index, kv_index):
    return score.mul_(2.0).sin_()


def constant(score, batch, head, q_index, kv_index):
    return (q_index * kv_index).to(score.dtype)[0, 0] * 0.1


def wide(score, batch, head, q_index, kv_index):
    return score.double() * 0.5


def steep_where_hidden(score, batch, head, q_index, kv_index):
    """Infinite slopes at the keys behind the query."""
    return score * torch.where(kv_index <= q_index, 1.0, math.inf)


def own_function(score, batch, head, q_index, kv_index):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    return Double.apply(score)


def stateless(score, batch, head, q_index, kv_index):
    return score.detach() * 2


@pytest.mark.parametrize("twin", [in_place, constant, wide, steep_where_hidden, own_function])
def test_a_twin_may_do_whatever_autograd_can_follow(twin, small_tiles):
    q, k, v = tensors(seqlen_q=9, seqlen_k=9)
    options = {"causal": True, "score_mod": ScoreMod(f"gradient_mods:{twin.__name__}", twin)}
    out, lse = forward(q, k, v, **options)
    dout = torch.randn_like(out)
    gradients = by_backend(dout, None, q, k, v, out, lse, **options)
    if twin is steep_where_hidden:
        options.pop("score_mod")
    expected = oracle_gradients(dout, None, q, k, v, **options)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_a_twin_that_lets_no_gradient_through_leaves_none_to_q_and_k(small_tiles):
    q, k, v = (x.requires_grad_() for x in tensors())
    out = fa3.flash_attn_func(q, k, v, score_mod=ScoreMod("gradient_mods:stateless", stateless))
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv != 0).any()


def test_blocks_that_a_block_mask_leaves_empty_are_not_computed_backward(monkeypatch):
    q, k, v = tensors(1, 300, 500, 2, 1)
    ids = torch.tensor([[0] * 140 + [1] * 360], dtype=torch.int32)
    options = {"block_mask": create_block_mask(document(ids), 1, None, 300, 500)}
    monkeypatch.setattr(tiled, "_tile_sizes", lambda problem, device: (2, 96, 64))
    out, lse = forward(q, k, v, **options)
    seen = []
    scores = tiled._scores
    monkeypatch.setattr(
        tiled, "_scores", lambda q, k, cap: seen.append((q.shape[-2], k.shape[-2])) or scores(q, k, cap)
    )
    gradients = by_backend(out, lse, q, k, v, out, lse, **options)
    visited = len(seen)
    assert visited < math.ceil(300 / 96) * math.ceil(500 / 64)
    forward(q, k, v, **options)
    assert seen[visited:] == seen[:visited]
    for name, expected in oracle_gradients(out, lse, q, k, v, **options).items():
        torch.testing.assert_close(gradients[name], expected)


def test_no_tensor_of_the_backward_has_the_size_of_the_score_matrix():
    seqlen = 4000
    q, k, v = (torch.randn(1, seqlen, 1, 8) for _ in range(3))
    options = {"score_mod": alibi(alibi_slopes(1)), "mask_mod": mask_mod_of("sieve", 1, seqlen)}
    out, lse = forward(q, k, v, **options)
    with LargestTensor() as largest:
        by_backend(out, lse, q, k, v, out, lse, **options)
    assert largest.elements <= tiled._TILE_SCORES_CPU < seqlen * seqlen / 10


# As PyTorch asks for them -------------------------------------------------------------------------------------------

AUTOGRAD = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "mods": {"score_mod": alibi(alibi_slopes(4)), "mask_mod": mask_mod_of("rows", 2, 11), "causal": True},
    "blocks": {"block_mask": create_block_mask(mask_mod_of("rows", 2, 11), None, None, 9, 11)},
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("options", AUTOGRAD.values(), ids=AUTOGRAD)
def test_checkpointing_gives_the_same_gradients_with_options(options, use_reentrant):
    inputs = [x.requires_grad_() for x in tensors()]

    def attend(q, k, v):
        return fa3.flash_attn_func(q, k, v, **options)

    expected = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    checkpoint(attend, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for one, other in zip(inputs, expected, strict=True):
        assert torch.equal(one.grad, other)


@pytest.mark.parametrize("options", AUTOGRAD.values(), ids=AUTOGRAD)
def test_a_second_derivative_is_refused_with_every_option(options):
    q, k, v = (x.requires_grad_() for x in tensors())
    (gradient,) = torch.autograd.grad(fa3.flash_attn_func(q, k, v, **options).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("options", AUTOGRAD.values(), ids=AUTOGRAD)
def test_gradients_come_twice_bitwise_the_same(options):
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.bfloat16))
    out = fa3.flash_attn_func(q, k, v, **options)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["score_mod", "all"])
def test_the_operator_of_the_gradients_works_in_inference_mode(kind):
    q, k, v = tensors(1, 6, 9, 2, 1, 8, 16)
    options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in CHECKED[kind].items()}
    out, lse = forward(q, k, v, **options)
    expected = by_backend(out, lse, q, k, v, out, lse, **options)
    with torch.inference_mode():
        again = by_backend(*(x.clone() for x in (out, lse, q, k, v, out, lse)), **options)
    for name, gradient in again.items():
        assert torch.equal(gradient, expected[name])
