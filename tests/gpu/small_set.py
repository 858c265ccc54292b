"""One small call of every shipped bf16 kernel, to be run under compute-sanitizer: see ``make sanitize``.

Lengths are multiples of nothing, so that every kernel runs its tails, and each has rows without keys.
"""

import torch

import fa3
from fa3 import mods
from fa3.backends import hopper
from fa3.options import Options
from fa3.presets import shipped_specs
from fa3.spec import ForwardSpec

BATCH, HEADS, HEADS_KV = 1, 2, 1


def options_of(spec: ForwardSpec, seqlen_q: int, seqlen_k: int) -> Options:
    """Options that the kernel of a spec is for."""
    ids = torch.arange(seqlen_k, device="cuda", dtype=torch.int32)[None] // 50
    ready_made = {
        "fa3.kernels.mods:alibi": lambda: mods.alibi(mods.alibi_slopes(HEADS, "cuda")),
        "fa3.kernels.mods:relative_bias": lambda: mods.relative_bias(torch.randn(HEADS, 33, device="cuda")),
        "fa3.kernels.mods:prefix_lm": lambda: mods.prefix_lm(torch.tensor([70], device="cuda", dtype=torch.int32)),
        "fa3.kernels.mods:document_causal": lambda: mods.document(ids, causal=True),
    }
    score_mod = ready_made[spec.score_mod]() if spec.score_mod else None
    mask_mod = ready_made[spec.mask_mod]() if spec.mask_mod else None
    block_mask = None
    if spec.mask == "blocks":
        block_mask = fa3.create_block_mask(mask_mod, 1, None, seqlen_q, seqlen_k, device="cuda")
        mask_mod = None
    left, right = (60, 20) if spec.mask == "window" else (-1, -1)
    return Options(
        window_left=left,
        window_right=right,
        softcap=20.0 if spec.softcap else 0.0,
        sink=torch.randn(HEADS, device="cuda"),
        qv=torch.randn(BATCH, seqlen_q, HEADS, spec.head_dim_v, device="cuda", dtype=torch.bfloat16)
        if spec.qv
        else None,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
    )


def main() -> None:
    count = 0
    for spec in dict.fromkeys((*shipped_specs("forward"), *shipped_specs("features"))):
        if spec.dtype != "bf16":
            continue
        seqlen_q, seqlen_k = (331, 331) if spec.mask == "blocks" else (331, 203)
        q = torch.randn(BATCH, seqlen_q, HEADS, spec.head_dim, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(BATCH, seqlen_k, HEADS_KV, spec.head_dim, device="cuda", dtype=q.dtype)
        v = torch.randn(BATCH, seqlen_k, HEADS_KV, spec.head_dim_v, device="cuda", dtype=q.dtype)
        options = options_of(spec, seqlen_q, seqlen_k)
        out, lse = hopper.forward_with_spec(spec, q, k, v, return_lse=True, options=options)
        assert torch.isfinite(out).all()
        assert lse is not None
        assert not torch.isnan(lse).any()
        count += 1
    torch.cuda.synchronize()
    print(f"{count} calls")


if __name__ == "__main__":
    main()
