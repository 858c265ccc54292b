"""Every option of a call in the tiled backend: against the oracle, and against autograd of its formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa3
from fa3.backends import tiled
from fa3.block_masks import create_block_mask
from fa3.mods import MaskMod, ScoreMod, alibi, alibi_slopes, document
from fa3.options import Options
from fa3.reference import visible_keys

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 4e-6, torch.float64: 1e-13}


def tensors(batch=1, seqlen_q=7, seqlen_k=9, heads_q=2, heads_kv=1, head_dim=16, head_dim_v=16, dtype=torch.float64):
    q = torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=torch.float64).to(dtype)
    k = torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=torch.float64).to(dtype)
    v = torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=torch.float64).to(dtype)
    return q, k, v


def options_of(window_size=(-1, -1), **others):
    return Options(*window_size, **others)


def assert_like_the_oracle(q, k, v, softmax_scale=None, causal=False, block_mask=None, **others):
    options = options_of(**others, block_mask=block_mask)
    out, lse = tiled.forward(q, k, v, softmax_scale, causal, True, options)
    if block_mask is not None:
        others["mask_mod"] = block_mask.mask_mod
    expected_out, expected_lse = fa3.reference(q, k, v, softmax_scale, causal, **others)
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    lse_tolerance = 1e-12 if q.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=lse_tolerance, atol=lse_tolerance)
    return out, lse


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 4 queries and 8 keys, so that small problems cross many tile edges."""
    monkeypatch.setattr(tiled, "_tile_sizes", lambda problem, device: (2, 4, 8))


sizes = {
    "batch": st.integers(1, 3),
    "seqlen_q": st.integers(1, 20),
    "seqlen_k": st.integers(0, 30),
    "heads_kv": st.integers(1, 2),
    "group": st.integers(1, 3),
    "head_dim": st.sampled_from([8, 24]),
    "head_dim_v": st.sampled_from([8, 40]),
}
tiles = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
# Many of them wider than the sequences.
windows = st.tuples(st.integers(-1, 35), st.integers(-1, 35)) | st.just((-1, -1))
chunks = st.integers(0, 35) | st.just(0)
softcaps = st.sampled_from([0.0, 0.0, 0.5, 30.0])
# The kind of a sink: none, some numbers, or one number for all.
sinks = st.sampled_from([None, "random", -math.inf, math.inf, 1e4])


def sink_of(kind, heads):
    if kind is None:
        return None
    return torch.randn(heads, dtype=torch.float64) if kind == "random" else torch.full((heads,), kind)


def qv_of(with_qv, q, v):
    return torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(q.dtype) if with_qv else None


@settings(max_examples=150, deadline=None)
@given(
    **sizes,
    causal=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.7]),
    window_size=windows,
    attention_chunk=chunks,
    softcap=softcaps,
    sink=sinks,
    with_qv=st.booleans(),
    tile=tiles,
    seed=st.integers(0, 1000),
)
def test_no_tile_size_changes_values_or_gradients_of_any_option(
    batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, causal, softmax_scale, window_size,
    attention_chunk, softcap, sink, with_qv, tile, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads_kv * group, heads_kv, head_dim, head_dim_v)
    options = {"window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap}
    extra = {"sink": sink_of(sink, heads_kv * group), "qv": qv_of(with_qv, q, v)}
    extra = {name: tensor for name, tensor in extra.items() if tensor is not None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_tile_sizes", lambda problem, device: tile)
        out, lse = assert_like_the_oracle(q, k, v, softmax_scale, causal, **options, **extra)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        dq, dk, dv, dsink, dqv = tiled.backward(
            dout, dlse, q, k, v, out, lse, softmax_scale, causal, options_of(**options, **extra)
        )
    inputs = [x.requires_grad_() for x in (q, k, v, *extra.values())]
    expected_out, expected_lse = fa3.reference(q, k, v, softmax_scale, causal, **options, **extra)
    # An infinite LSE is a constant: it has no gradient to hand back.
    seen = expected_lse.masked_fill(expected_lse.isinf(), 0.0)
    dlse = dlse.masked_fill(expected_lse.isinf(), 0.0)
    expected = torch.autograd.grad(
        (expected_out * dout).sum() + (seen * dlse).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    gradients = [dq, dk, dv, *(x for x in (dsink, dqv) if x is not None)]
    for gradient, by_autograd in zip(gradients, expected, strict=True):
        if gradient is dsink and sink in (math.inf, -math.inf):
            continue  # Differences of infinities in autograd; tests of their own follow.
        assert gradient.dtype == by_autograd.dtype
        tolerance = 1e-11 if gradient.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(gradient, by_autograd, rtol=tolerance, atol=tolerance)


def bend(score, batch, head, q_index, kv_index, bend_by, offsets):
    """Not linear in the score, and different for every index."""
    return score * bend_by[batch, head].sigmoid() + 0.1 * offsets[q_index % 5] - 0.05 * (kv_index % 7)


def sieve(batch, head, q_index, kv_index, numbers):
    return (numbers[batch] * kv_index + head + q_index) % 3 != 0


def no_key_for_odd_queries(batch, head, q_index, kv_index):
    return q_index % 2 == 0


def score_mod_of(kind, batch, heads):
    if kind == "alibi":
        return alibi(alibi_slopes(heads))
    if kind == "bend":
        return ScoreMod("tiled_mods:bend", bend, (torch.randn(batch, heads), torch.arange(5, dtype=torch.int32)))
    return None


def mask_mod_of(kind, batch, length):
    if kind == "document":
        return document(torch.randint(0, 3, (batch, length), dtype=torch.int32).sort(dim=1).values, causal=True)
    if kind == "sieve":
        return MaskMod("tiled_mods:sieve", sieve, (torch.randint(0, 9, (batch,), dtype=torch.int32),))
    return None if kind is None else MaskMod("tiled_mods:no_key_for_odd_queries", no_key_for_odd_queries)


@settings(max_examples=150, deadline=None)
@given(
    **sizes,
    causal=st.booleans(),
    window_size=windows,
    attention_chunk=chunks,
    softcap=softcaps,
    sink=sinks,
    with_qv=st.booleans(),
    score_mod=st.sampled_from([None, "alibi", "bend"]),
    mask_mod=st.sampled_from([None, "document", "sieve", "rows"]),
    tile=tiles,
    seed=st.integers(0, 1000),
)
def test_modifications_go_with_every_other_option(
    batch, seqlen_q, seqlen_k, heads_kv, group, head_dim, head_dim_v, causal, window_size, attention_chunk, softcap,
    sink, with_qv, score_mod, mask_mod, tile, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    heads = heads_kv * group
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, head_dim_v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_tile_sizes", lambda problem, device: tile)
        assert_like_the_oracle(
            q,
            k,
            v,
            causal=causal,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            sink=sink_of(sink, heads),
            qv=qv_of(with_qv, q, v),
            score_mod=score_mod_of(score_mod, batch, heads),
            mask_mod=mask_mod_of(mask_mod, batch, max(seqlen_q, seqlen_k)),
        )


EVERYTHING = {"window_size": (30, 20), "attention_chunk": 25, "softcap": 5.0}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_takes_every_option(dtype, sink_dtype, small_tiles):
    q, k, v = tensors(2, 50, 40, 4, 2, 16, 24, dtype)
    sink, qv = torch.randn(4).to(sink_dtype), torch.randn(2, 50, 4, 24).to(dtype)
    assert_like_the_oracle(q, k, v, **EVERYTHING, sink=sink, qv=qv, score_mod=alibi(alibi_slopes(4)))


def count_scores(monkeypatch):
    """Shapes (rows of all heads, keys) of the tiles of scores that are computed."""
    shapes = []
    scores = tiled._scores

    def counting(q_tile, k_tile, softcap):
        shapes.append((q_tile.shape[-2], k_tile.shape[-2]))
        return scores(q_tile, k_tile, softcap)

    monkeypatch.setattr(tiled, "_scores", counting)
    return shapes


@pytest.mark.parametrize(
    "mask",
    [
        {"window_size": (9, 3)},
        {"window_size": (-1, 5)},
        {"window_size": (6, -1)},
        {"causal": True, "window_size": (9, -1)},
        {"attention_chunk": 10},
        {"attention_chunk": 16, "window_size": (5, 40)},
        {"causal": True, "attention_chunk": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (40, 100), (80, 50)])
def test_no_key_outside_of_a_mask_is_looked_at(mask, seqlen_q, seqlen_k, small_tiles, monkeypatch):
    q, k, v = tensors(1, seqlen_q, seqlen_k)
    needed = 0
    for rows in visible_keys(seqlen_q, seqlen_k, **mask).split(4):
        keys = rows.any(dim=0).nonzero()
        needed += 0 if len(keys) == 0 else len(rows) * int(keys[-1] - keys[0] + 1)
    shapes = count_scores(monkeypatch)
    out, lse = assert_like_the_oracle(q, k, v, **mask)
    assert sum(rows * keys for rows, keys in shapes) == needed
    shapes.clear()
    causal, options = mask.get("causal", False), {name: x for name, x in mask.items() if name != "causal"}
    tiled.backward(out, lse, q, k, v, out, lse, None, causal, options_of(**options))
    assert sum(rows * keys for rows, keys in shapes) <= needed


@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_that_a_block_mask_leaves_empty_are_not_computed(per_head, monkeypatch):
    batch, heads, seqlen_q, seqlen_k = 2, 2, 300, 500
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, 1)
    ids = torch.tensor([0] * 140 + [1] * 360, dtype=torch.int32).repeat(batch, 1)
    block_mask = create_block_mask(document(ids), batch, heads if per_head else None, seqlen_q, seqlen_k)
    monkeypatch.setattr(tiled, "_tile_sizes", lambda problem, device: (2, 96, 64))
    shapes = count_scores(monkeypatch)
    assert_like_the_oracle(q, k, v, block_mask=block_mask, sink=torch.randn(heads), softcap=3.0)
    blocks = block_mask.kinds().any(dim=0).any(dim=0)
    visited = [
        (min(96, seqlen_q - i), min(64, seqlen_k - j))
        for i in range(0, seqlen_q, 96)
        for j in range(0, seqlen_k, 64)
        if blocks[i // 128 : (i + 95) // 128 + 1, j // 128 : (j + 63) // 128 + 1].any()
    ]
    assert shapes == visited
    assert len(visited) < math.ceil(seqlen_q / 96) * math.ceil(seqlen_k / 64)


def test_heads_of_a_block_mask_may_visit_blocks_of_their_own():
    def own_half(batch, head, q_index, kv_index):
        return (kv_index >= 256) == (head == 1)

    q, k, v = tensors(1, 130, 512, 2, 1)
    # What follows the listed blocks is not read.
    block_mask = create_block_mask(MaskMod("tiled_mods:own_half", own_half), None, 2, 130, 512)
    block_mask.indices[..., 2:] = 1_000_000
    assert_like_the_oracle(q, k, v, block_mask=block_mask)


def test_a_sink_of_minus_infinity_is_none(small_tiles):
    q, k, v = tensors(seqlen_q=15, seqlen_k=12, dtype=torch.float32)
    plain = tiled.forward(q, k, v, None, True, True)
    with_sink = tiled.forward(q, k, v, None, True, True, Options(sink=torch.full((2,), -math.inf)))
    for one, other in zip(plain, with_sink, strict=True):
        assert torch.equal(one, other)
    gradients = tiled.backward(*plain, q, k, v, *plain, None, True)
    with_sink = tiled.backward(*plain, q, k, v, *plain, None, True, Options(sink=torch.full((2,), -math.inf)))
    for one, other in zip(gradients[:3], with_sink[:3], strict=True):
        torch.testing.assert_close(one, other)
    assert (with_sink[3] == 0).all()


@pytest.mark.parametrize("sink", [1e4, 1e30, math.inf])
def test_a_very_large_sink_takes_all_and_stays_a_number(sink, small_tiles):
    q, k, v = tensors(seqlen_q=15, seqlen_k=4, dtype=torch.float32)
    options = Options(sink=torch.full((2,), sink))
    out, lse = tiled.forward(q, k, v, None, True, True, options)
    assert (out == 0).all()
    assert (lse == sink).all()
    *gradients, dsink, _ = tiled.backward(
        torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, None, True, options
    )
    assert all((gradient == 0).all() for gradient in gradients)
    # The LSE of each of the 15 rows is the sink.
    assert dsink.tolist() == [15.0, 15.0]


def test_a_sink_is_the_lse_of_rows_without_keys_and_takes_its_gradient(small_tiles):
    q, k, v = tensors(seqlen_q=15, seqlen_k=4)
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
    options = Options(sink=sink)
    out, lse = tiled.forward(q, k, v, None, True, True, options)
    assert (out[:, :11] == 0).all()
    assert torch.equal(lse[0, :, :11], sink[:, None].expand(2, 11))
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
    dlse[:, :, :11] = 1.0
    # What is NaN in the rows without keys cannot count, but for the gradient of their LSE.
    q[:, :11] = dout[:, :11] = math.nan
    *gradients, dsink, _ = tiled.backward(dout, dlse, q, k, v, out, lse, None, True, options)
    assert all((gradient == 0).all() for gradient in gradients)
    assert dsink.tolist() == [11.0, 11.0]


def test_without_keys_the_sink_is_the_lse():
    q, k, v = tensors(seqlen_k=0)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    out, lse = fa3.flash_attn_func(q, k, v, sink=sink, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sink[None, :, None].expand_as(lse))
    assert torch.autograd.grad(lse.sum(), sink)[0].tolist() == [7.0, 7.0]


def test_a_score_mod_may_hide_keys_too(small_tiles):
    def hide(score, batch, head, q_index, kv_index):
        return score.masked_fill(q_index % 3 == 0, -math.inf)

    out, lse = assert_like_the_oracle(*tensors(), score_mod=ScoreMod("tiled_mods:hide", hide))
    assert (out[:, ::3] == 0).all()
    assert (lse[:, :, ::3] == -math.inf).all()


def test_what_a_twin_answers_is_not_written(small_tiles):
    table = torch.randn(1, 2, 7 * 9).view(2, 7, 9)

    def replace(score, batch, head, q_index, kv_index, table):
        assert score.shape == torch.broadcast_shapes(batch.shape, head.shape, q_index.shape, kv_index.shape)
        rows, keys = q_index.flatten(), kv_index.flatten()
        return table[None, :, rows[0] : rows[-1] + 1, keys[0] : keys[-1] + 1]

    before = table.clone()
    mod = ScoreMod("tiled_mods:replace", replace, (table,))
    assert_like_the_oracle(*tensors(dtype=torch.float32), score_mod=mod, window_size=(3, 3))
    assert torch.equal(table, before)


def answer_a_number(*arguments):
    return 3.0


def answer_integers(batch, head, q_index, kv_index):
    return q_index + kv_index


def answer_a_mask(score, *index):
    return score > 0


@pytest.mark.parametrize("attend", [fa3.flash_attn_func, fa3.reference])
@pytest.mark.parametrize(
    ("mods", "words"),
    [
        ({"score_mod": ScoreMod("tiled_mods:number", answer_a_number)}, "number answered float: must be .*scores"),
        ({"score_mod": ScoreMod("tiled_mods:mask", answer_a_mask)}, r"mask answered torch\.bool: must be .*scores"),
        ({"mask_mod": MaskMod("tiled_mods:number", answer_a_number)}, "number answered float: must be a bool tensor"),
        (
            {"mask_mod": MaskMod("tiled_mods:integers", answer_integers)},
            r"integers answered torch\.int64: must be a bool tensor",
        ),
    ],
    ids=["number", "mask", "no mask", "integers"],
)
def test_a_twin_that_answers_something_else_is_named(attend, mods, words):
    with pytest.raises(TypeError, match=rf"tiled_mods:{words}"):
        attend(*tensors(), **mods)


def test_a_twin_that_reads_a_tensor_with_gradients_is_refused():
    slope = torch.ones((), dtype=torch.float64, requires_grad=True)
    mod = ScoreMod("tiled_mods:sloped", lambda score, *index: score * slope)
    q, k, v = tensors()
    words = r"tiled_mods:sloped reads a tensor that requires a gradient.*no_grad"
    with pytest.raises(NotImplementedError, match=words):
        fa3.flash_attn_func(q, k, v, score_mod=mod)
    with torch.no_grad():
        assert torch.equal(fa3.flash_attn_func(q, k, v, score_mod=mod), fa3.flash_attn_func(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_short_dtypes_with_options_are_those_of_the_oracle(dtype, small_tiles):
    q, k, v = tensors(2, 33, 47, 4, 2, 16, 24, dtype)
    inputs = {"q": q, "k": k, "v": v, "sink": torch.randn(4, dtype=dtype), "qv": torch.randn(2, 33, 4, 24, dtype=dtype)}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out, lse = fa3.flash_attn_func(**inputs, **EVERYTHING, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad([out, lse], list(inputs.values()), [dout, dlse])
    expected_out, expected_lse = fa3.reference(**inputs, **EVERYTHING)
    expected = torch.autograd.grad([expected_out, expected_lse], list(inputs.values()), [dout.double(), dlse.double()])
    for gradient, by_autograd in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - by_autograd.double()).abs().max() / by_autograd.double().abs().max()
        assert error < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_options_pass_gradcheck(causal, small_tiles):
    inputs = [*tensors(1, 6, 9, 2, 1, 8, 16), torch.randn(2, dtype=torch.float64), torch.randn(1, 6, 2, 16).double()]

    def attend(q, k, v, sink, qv):
        return fa3.flash_attn_func(
            q, k, v, causal=causal, window_size=(5, 2), softcap=2.0, sink=sink, qv=qv, return_lse=True
        )

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize(("seqlen", "heads"), [(1, 2), (5, 1)])
def test_inputs_are_never_written(seqlen, heads):
    q, k, v = tensors(1, seqlen, 6, heads, 1, dtype=torch.float32)
    sink, qv = torch.randn(heads), torch.randn(1, seqlen, heads, 16)
    options = Options(softcap=2.0, window_left=3, sink=sink, qv=qv)
    out, lse = tiled.forward(q, k, v, 0.3, False, True, options)
    given = (q, k, v, sink, qv, out, lse, torch.ones_like(out), torch.ones_like(lse))
    before = [x.clone() for x in given]
    tiled.forward(q, k, v, 0.3, False, True, options)
    tiled.backward(*given[-2:], q, k, v, out, lse, 0.3, False, options)
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then)


def test_no_intermediate_has_the_size_of_the_score_matrix():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    seqlen = 6000
    q, k, v, qv = (torch.randn(1, seqlen, 1, 8) for _ in range(4))
    options = Options(attention_chunk=5000, softcap=2.0, sink=torch.zeros(1), qv=qv)
    mods = Options(score_mod=alibi(alibi_slopes(1)), mask_mod=mask_mod_of("sieve", 1, seqlen))
    with Watch():
        out, lse = tiled.forward(q, k, v, None, True, True, options)
        tiled.backward(out, lse, q, k, v, out, lse, None, True, options)
        tiled.forward(q, k, v, None, True, True, mods)
    assert largest <= max(tiled._TILE_SCORES_CPU, seqlen * 16) < seqlen * seqlen / 30


def test_a_twin_that_answers_another_shape_is_named():
    q = torch.randn(1, 5, 2, 64)
    bad = ScoreMod("callers.own:wide", lambda score, *_: score.new_zeros(1, 1, 1, 40))
    wrong = r"twin of 'callers.own:wide' returned shape \(1, 1, 1, 40\): must broadcast to .* = \(1, 2, 5, 5\)"
    for function in (fa3.flash_attn_func, fa3.reference):
        with pytest.raises(ValueError, match=wrong):
            function(q, q, q, score_mod=bad)
