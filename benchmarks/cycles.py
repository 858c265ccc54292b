"""SM cycles of candidate kernels, beside the official FlashAttention-3: they do not depend on the power limit.

    ncu --clock-control none --profile-from-start off --metrics sm__cycles_elapsed.max --csv \\
        python benchmarks/cycles.py SPECS.json NAMES.json 16384,4096 > cycles.csv

``SPECS.json`` is a list of specs as dicts (``spec.as_dict()``), whose artifacts are in the store. The launches come in
the order of ``NAMES.json``, which this writes: (head dim, causal, seqlen, spec or "official"). The official package
launches a small kernel of a few thousand cycles before each causal one; leave those lines out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from fa3.backends import hopper
from fa3.cli import peers
from fa3.kernel_spec import spec_from_dict

TOKENS, HIDDEN = 16384, 2048


def main() -> None:
    specs = [spec_from_dict(fields) for fields in json.loads(Path(sys.argv[1]).read_text())]
    seqlens = [int(item) for item in sys.argv[3].split(",")]
    official, _ = peers.find(torch.device("cuda"), ("official",))
    names: list[tuple[int, bool, int, str]] = []
    calls = []
    for head_dim, causal in sorted({(spec.head_dim, spec.causal) for spec in specs}):
        for seqlen in seqlens:
            shape = (TOKENS // seqlen, seqlen, HIDDEN // head_dim, head_dim)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            for spec in specs:
                if (spec.head_dim, spec.causal) == (head_dim, causal):
                    names.append((head_dim, causal, seqlen, spec.name))
                    calls.append(lambda spec=spec, q=q, k=k, v=v: hopper.forward_with_spec(spec, q, k, v))
            for impl in official:
                names.append((head_dim, causal, seqlen, impl.name))
                calls.append(impl.prepare(q, k, v, causal))
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    Path(sys.argv[2]).write_text(json.dumps(names))


if __name__ == "__main__":
    main()
