"""How the arguments of a call travel through an operator, whose schema knows tensors, numbers and strings alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa3.mods import MAX_AUX, BlockMask, MaskMod, ScoreMod, twin
from fa3.options import Fp8, Options
from fa3.problem import named

#: The options that are no modification, as the first fields of `Options` are.
COMMON = (
    "int window_left=-1, int window_right=-1, int attention_chunk=0, float softcap=0.0, Tensor? sink=None, "
    "Tensor? qv=None, bool? pack_gqa=None, int sm_margin=0, bool deterministic=False"
)
COMMON_COUNT = 9
#: Which of them are tensors that have gradients.
SINK, QV = 4, 5

# A modification is the name of its CuTe DSL twin, by which `fa3.mods.twin` finds the one in PyTorch, and at most two
# tensors. They are no list, since vmap knows no lists.
#: All options, as `flatten` writes them.
OPTIONS = (
    f"{COMMON}, str score_mod='', Tensor? score_aux0=None, Tensor? score_aux1=None, str mask_mod='', "
    "Tensor? mask_aux0=None, Tensor? mask_aux1=None, Tensor? block_counts=None, Tensor? block_indices=None, "
    "int block_seqlen_q=0, int block_seqlen_k=0, Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? v_scale_max=None, int q_block=0, int k_block=0, bool v_transposed=False, str out_dtype='', "
    "bool? two_level=None"
)
#: Where what goes with e4m3 begins, after 3 arguments of each modification and 4 of a block mask; its out_dtype is
#: empty where there is no `Fp8`.
FP8 = COMMON_COUNT + 10
#: Where tensors stand that modifications read, and what users call them.
AUX = {
    COMMON_COUNT + 1: "score_mod.aux[0]",
    COMMON_COUNT + 2: "score_mod.aux[1]",
    COMMON_COUNT + 4: "mask_mod.aux[0]",
    COMMON_COUNT + 5: "mask_mod.aux[1]",
}


def flatten(options: Options) -> tuple[Any, ...]:
    """Options as the arguments of an operator that follow ``causal``."""
    block_mask = options.block_mask
    # The dispatcher fills in what is missing at the end.
    blocks: tuple[Any, ...] = () if options.fp8 is None else (None, None, 0, 0)
    if block_mask is not None:
        blocks = (block_mask.counts, block_mask.indices, block_mask.seqlen_q, block_mask.seqlen_k)
    mask_mod = options.mask_mod if block_mask is None else block_mask.mask_mod
    return (
        *options[:COMMON_COUNT],
        *_flatten_mod(options.score_mod),
        *_flatten_mod(mask_mod),
        *blocks,
        *(options.fp8 or ()),
    )


def _flatten_mod(mod: ScoreMod | MaskMod | None) -> tuple[Any, ...]:
    return ("", None, None) if mod is None else (mod.cute, *mod.aux, *(None,) * (MAX_AUX - len(mod.aux)))


def unflatten(arguments: tuple[Any, ...]) -> Options | None:
    """The options that `flatten` wrote, less those at the end that have their defaults: the dispatcher drops them."""
    if not arguments:
        return None
    common, mods, fp8 = arguments[:COMMON_COUNT], arguments[COMMON_COUNT:FP8], arguments[FP8:]
    score_mod, mask_mod, block_mask = _unflatten_mods(*mods)
    return Options(*common)._replace(
        score_mod=score_mod, mask_mod=mask_mod, block_mask=block_mask, fp8=_unflatten_fp8(*fp8)
    )


def _unflatten_fp8(
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    v_scale_max: Tensor | None = None,
    q_block: int = 0,
    k_block: int = 0,
    v_transposed: bool = False,
    out_dtype: str = "",
    two_level: bool | None = None,
) -> Fp8 | None:
    scales = (q_scale, k_scale, v_scale, v_scale_max)
    return Fp8(*scales, q_block, k_block, v_transposed, out_dtype, two_level) if out_dtype else None


def _unflatten_mods(
    score_mod: str = "",
    score_aux0: Tensor | None = None,
    score_aux1: Tensor | None = None,
    mask_mod: str = "",
    mask_aux0: Tensor | None = None,
    mask_aux1: Tensor | None = None,
    block_counts: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_seqlen_q: int = 0,
    block_seqlen_k: int = 0,
) -> tuple[ScoreMod | None, MaskMod | None, BlockMask | None]:
    score_aux, mask_aux = (
        tuple(tensor for tensor in pair if tensor is not None)
        for pair in ((score_aux0, score_aux1), (mask_aux0, mask_aux1))
    )
    score = ScoreMod(score_mod, twin(score_mod), score_aux) if score_mod else None
    mask = MaskMod(mask_mod, twin(mask_mod), mask_aux) if mask_mod else None
    if block_counts is None:
        return score, mask, None
    # A block mask complains about what is missing.
    blocks = BlockMask(mask, block_seqlen_q, block_seqlen_k, block_counts, block_indices)  # type: ignore[arg-type]
    return score, None, blocks


def unpack(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 * heads_kv, head_dim).
        num_heads_q: heads_q of the second kind; with the first ``None`` or its heads.

    Raises:
        TypeError: ``num_heads_q`` is missing.
        ValueError: ``qkv`` has another shape, or ``num_heads_q`` does not fit it.
    """
    if qkv.dim() == 5:
        if qkv.shape[2] != 3:
            raise ValueError(
                f"qkv has shape {tuple(qkv.shape)}: with 5 dims it must be (batch, seqlen, 3, heads, head_dim)"
            )
        if num_heads_q is not None and num_heads_q != qkv.shape[3]:
            raise ValueError(
                f"{named('num_heads_q', num_heads_q)}: qkv has {qkv.shape[3]} query heads, as many as key and value "
                "heads; other numbers go with a qkv of 4 dims"
            )
        q, k, v = qkv.unbind(2)
        return q, k, v
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv has {qkv.dim()} dims, shape {tuple(qkv.shape)}: must be (batch, seqlen, 3, heads, head_dim), or "
            "(batch, seqlen, heads_q + 2 * heads_kv, head_dim) with num_heads_q"
        )
    if num_heads_q is None:
        raise TypeError(
            "num_heads_q is None: a qkv of 4 dims, (batch, seqlen, heads_q + 2 * heads_kv, head_dim), wants it"
        )
    heads_kv = (qkv.shape[2] - num_heads_q) // 2
    nothing_left = heads_kv == 0 and num_heads_q > 0
    if not 0 <= num_heads_q <= qkv.shape[2] or num_heads_q + 2 * heads_kv != qkv.shape[2] or nothing_left:
        raise ValueError(
            f"{named('num_heads_q', num_heads_q)}: qkv has {qkv.shape[2]} heads in all, which must be "
            "num_heads_q + 2 * heads_kv, with heads_kv at least 1"
        )
    q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    return q, k, v
