"""What a call may ask for beyond its tensors, scale and causal mask."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fa3.mods import BlockMask, MaskMod, ScoreMod


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
