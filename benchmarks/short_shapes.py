"""GPU time of candidate kernels and of all peers at shapes that do not fill the chip.

    python benchmarks/short_shapes.py SPECS.json

``SPECS.json`` is a list of specs as dicts (``spec.as_dict()``), whose artifacts are in the store. Prints microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import torch

from fa3.backends import hopper
from fa3.cli import peers
from fa3.cli.timing import burst
from fa3.spec import spec_from_dict

#: (batch, seqlen, query heads, K/V heads, head dim, causal)
SHAPES = (
    (1, 512, 16, 16, 128, False),
    (1, 1024, 16, 16, 128, False),
    (1, 2048, 16, 16, 128, False),
    (1, 2048, 16, 16, 128, True),
    (2, 1024, 8, 8, 128, False),
    (64, 197, 12, 12, 64, False),
    (1, 512, 16, 16, 64, False),
    (1, 1024, 16, 16, 64, False),
    (8, 2048, 32, 8, 128, True),
    (1, 512, 8, 8, 256, False),
)
ROUNDS, CALLS = 9, 20


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    specs = [spec_from_dict(fields) for fields in json.loads(Path(sys.argv[1]).read_text())]
    impls, _ = peers.find(device)
    for batch, seqlen, heads, heads_kv, head_dim, causal in SHAPES:
        q = torch.randn(batch, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(batch, seqlen, heads_kv, head_dim, device=device, dtype=q.dtype) for _ in range(2))
        entries = [(impl.name, impl.prepare(q, k, v, causal), impl.context) for impl in impls]
        for spec in specs:
            if (spec.head_dim, spec.causal) == (head_dim, causal):
                call = lambda spec=spec, q=q, k=k, v=v: hopper.forward_with_spec(spec, q, k, v)  # noqa: E731
                entries.append((spec.name, call, impls[0].context))
        times: dict[str, list[float]] = {name: [] for name, _, _ in entries}
        with torch.inference_mode():
            for _ in range(ROUNDS + 1):
                for name, call, context in entries:
                    with context():
                        times[name].append(burst(device, [call], CALLS).ms * 1e3)
        medians = {name: statistics.median(samples[1:]) for name, samples in times.items()}
        print((batch, seqlen, heads, heads_kv, head_dim, "causal" if causal else "full"))
        for name, microseconds in sorted(medians.items(), key=lambda item: item[1]):
            print(f"  {microseconds:8.1f} us  {name}")


if __name__ == "__main__":
    main()
