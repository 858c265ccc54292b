"""What a call may ask for beyond its tensors, scale and causal mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa3.mods import BlockMask, MaskMod, ScoreMod
from fa3.quantization import QK_DTYPES

#: fa3's names of what an e4m3 call may answer in.
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fp8(NamedTuple):
    """What goes with e4m3 q, k and v, or int8 q and k beside e4m3 v: an element is its value times its scale.

    Attributes:
        q_scale: float32, any strides: (batch, heads_kv), for all query heads of a group, or (batch, heads_q); with
            ``q_block`` (batch, heads_q, ceil(seqlen_q / q_block)). ``None`` is 1.
        k_scale, v_scale: float32, any strides: (batch, heads_kv); with ``k_block`` (batch, heads_kv,
            ceil(seqlen_k / k_block)). ``None`` is 1, which without ``k_block`` alone is allowed.
        v_scale_max: (batch, heads_kv), the largest of each head's ``v_scale``, beside one of blocks.
        q_block, k_block: rows that share a scale, 64 or 128 of q, 64, 96 or 128 of k and v; 0: all of a head do.
        v_transposed: v is V^T as `fa3.quantization.transposed` makes it.
        out_dtype: of out, ``"bf16"`` or ``"fp16"``.
        two_level: add partial outputs in float32, not in the tensor cores, which keep 14 bits; ``None`` leaves the
            choice to the plan.
    """

    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    v_scale_max: Tensor | None = None
    q_block: int = 0
    k_block: int = 0
    v_transposed: bool = False
    out_dtype: str = "bf16"
    two_level: bool | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The scales: of q, of k, of v, and the largest of v."""
        return self.q_scale, self.k_scale, self.v_scale, self.v_scale_max


class Options(NamedTuple):
    """The rarer arguments of a call, checked for type but not yet against its tensors.

    A plain call has ``None`` in its place: building one costs as much as the rest of the Python side.

    Attributes:
        window_left, window_right: keys to either side of a query's position that it sees; -1 is open.
        attention_chunk: if positive, a query sees only keys of the chunk of so many that its position is in.
        softcap: if positive, scaled scores s become ``softcap * tanh(s / softcap)``.
        sink: (heads_q,), a logit a head without a value.
        qv: (batch, seqlen_q, heads_q, head_dim_v), adds ``qv · v`` to ``q · k``.
        pack_gqa: whether query heads of a group share a tile; ``None`` chooses. Changes no result.
        sm_margin: multiprocessors to leave free. Changes no result.
        deterministic: gradients are bitwise the same from run to run. Changes no result of a forward.
        score_mod, mask_mod, block_mask: see `fa3.mods`.
        fp8: what goes with e4m3 q, k and v; ``None`` beside such is the same as ``Fp8()``.
    """

    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    softcap: float = 0.0
    sink: Tensor | None = None
    qv: Tensor | None = None
    pack_gqa: bool | None = None
    sm_margin: int = 0
    deterministic: bool = False
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    block_mask: BlockMask | None = None
    fp8: Fp8 | None = None


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether q of this dtype goes with v of e4m3: it is that too, or int8."""
    return dtype in QK_DTYPES.values()


def fp8_of(dtype: torch.dtype, options: Options | None) -> Fp8 | None:
    """What of the options goes with e4m3, where ``dtype``, that of q, says that v is such, else ``None``."""
    if not is_fp8(dtype):
        return None
    return Fp8() if options is None or options.fp8 is None else options.fp8


def out_dtype_of(dtype: torch.dtype, options: Options | None) -> torch.dtype:
    """The dtype of out, given that of q."""
    fp8 = fp8_of(dtype, options)
    return dtype if fp8 is None else OUT_DTYPES[fp8.out_dtype]
