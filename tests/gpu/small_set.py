"""One small call of every shipped kernel, to be run under compute-sanitizer: see ``make sanitize``.

Lengths are multiples of nothing, so that every kernel runs its tails; a second call has rows without keys.
"""

import torch

from fa3.backends import hopper
from fa3.plan import shipped_specs

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    count = 0
    for spec in shipped_specs("forward"):
        for batch, seqlen_q, seqlen_k, heads_q, heads_kv in ((2, 203, 331, 2, 1), (1, 260, 97, 1, 1)):
            q = torch.randn(batch, seqlen_q, heads_q, spec.head_dim, device="cuda", dtype=DTYPES[spec.dtype])
            k, v = (torch.randn(batch, seqlen_k, heads_kv, spec.head_dim, device="cuda", dtype=q.dtype) for _ in "kv")
            out, lse = hopper.forward_with_spec(spec, q, k, v, return_lse=True)
            assert torch.isfinite(out).all()
            assert lse is not None
            assert not torch.isnan(lse).any()
            count += 1
    torch.cuda.synchronize()
    print(f"{count} calls")


if __name__ == "__main__":
    main()
