"""README table and pictures from the result files in benchmarks/results; nothing here is typed by hand.

    python scripts/make_figures.py           write docs/images/*.png and the block between the README's markers
    python scripts/make_figures.py --check   write nothing; exit code 1 if the README's block is not up to date

Of several result files of one kind the one with the latest date counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"

BEGIN = "<!-- speed: written by scripts/make_figures.py -->"
END = "<!-- end of speed -->"

#: Kind of a result file -> the picture made of it, and its alternative text.
PICTURES = {
    "speed": ("speed.png", "Forward speed of fa3 and of its peers by sequence length"),
    "ablation": ("ablation.png", "The switches of the schedule, off and on"),
    "host": ("host.png", "Host time of one call"),
}
#: Kinds of result files that the README shows.
KINDS = (*PICTURES, "odd")
#: Columns of the README's table, in this order.
IMPLS = ("fa3", "official", "fa4", "cudnn", "fa2")
TABLE_SEQLENS = (1024, 4096, 16384)
#: Short and odd shapes that the README shows, the first of the file; the file has them all.
TABLE_SHAPES = 8


def latest(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Kind -> (file, result) of the latest measurement on a GPU of each kind."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        kind = result.get("kind")
        if kind not in KINDS or not result["rows"] or result["gpu"] is None:
            continue
        # The speed that is shown is that of bf16.
        if kind == "speed" and any(row["dtype"] != "bf16" for row in result["rows"]):
            continue
        if kind not in found or result["date"] > found[kind][1]["date"]:
            found[kind] = (path, result)
    return found


def speed_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of burst TFLOPS; the fastest of a line is bold."""
    rows = [row for row in result["rows"] if row["regime"] == "burst" and row["direction"] == "fwd"]
    impls = [impl for impl in IMPLS if any(row["impl"] == impl for row in rows)]
    lines = [
        "| head dim | mask | sequence | " + " | ".join(impls) + " |",
        "| --- | --- | --- |" + " --- |" * len(impls),
    ]
    cells = sorted({(row["d"], row["causal"], row["s"]) for row in rows})
    seqlens = {s for _, _, s in cells}
    shown = [s for s in TABLE_SEQLENS if s in seqlens] or sorted(seqlens)
    for d, causal, s in cells:
        if s not in shown:
            continue
        speed = {row["impl"]: row["tflops"] for row in rows if (row["d"], row["causal"], row["s"]) == (d, causal, s)}
        best = max(speed.values())
        texts = [
            "" if impl not in speed else f"**{speed[impl]:.0f}**" if speed[impl] == best else f"{speed[impl]:.0f}"
            for impl in impls
        ]
        lines.append(f"| {d} | {'causal' if causal else 'full'} | {s} | " + " | ".join(texts) + " |")
    return lines


def origin(path: Path, result: dict[str, Any]) -> str:
    """One line that says where a picture or a table comes from."""
    versions = ", ".join(f"{impl}: {version}" for impl, version in result["impls"].items())
    return (
        f"{result['gpu']}, driver {result['driver']}, CUDA {result['cuda']}, torch {result['torch']}, "
        f"CuTe DSL {result['cutlass']}, {result['date'][:10]}, commit `{result['commit'][:12]}`; "
        f"`{result['command']}`; {versions}. "
        f"[{path.name}](benchmarks/results/{path.name})"
    )


def host_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of host time."""
    rows = result["rows"]
    return [
        "| " + " | ".join(row["impl"] for row in rows) + " |",
        "|" + " --- |" * len(rows),
        "| " + " | ".join(f"{row['host_us']:.1f}" for row in rows) + " |",
    ]


def odd_table(result: dict[str, Any]) -> list[str]:
    """Markdown table of short and odd shapes: microseconds of a call in a row of calls, host included."""
    rows = result["rows"]
    impls = [impl for impl in IMPLS if any(row["impl"] == impl for row in rows)]
    lines = [
        "| batch, sequence, heads/K/V heads, head dim | mask | " + " | ".join(impls) + " |",
        "| --- | --- |" + " --- |" * len(impls),
    ]
    fields = ("b", "s", "h", "hk", "d", "dv", "causal", "window")
    shapes = list(dict.fromkeys(tuple(row[field] for field in fields) for row in rows))
    for shape in shapes[:TABLE_SHAPES]:
        b, s, h, hk, d, dv, causal, window = shape
        times = {row["impl"]: row["call_us"] for row in rows if tuple(row[field] for field in fields) == shape}
        best = min(times.values())
        texts = [
            "" if impl not in times else f"**{times[impl]:.0f}**" if times[impl] == best else f"{times[impl]:.0f}"
            for impl in impls
        ]
        dims = f"{d}" if d == dv else f"{d}/{dv}"
        mask = f"window {window}" if window else "causal" if causal else "full"
        lines.append(f"| {b}, {s}, {h}/{hk}, {dims} | {mask} | " + " | ".join(texts) + " |")
    return lines


def block(results: dict[str, tuple[Path, dict[str, Any]]]) -> str:
    """What stands between the markers of the README."""
    lines = [BEGIN, ""]
    if not results:
        lines += ["Not measured yet: no result file of a GPU is in benchmarks/results.", ""]
    if "speed" in results:
        path, result = results["speed"]
        lines += [f"![{PICTURES['speed'][1]}](docs/images/speed.png)", ""]
        lines += ["Forward, TFLOPS in short bursts, 16k tokens in all, bold is the fastest of the line:", ""]
        lines += [*speed_table(result), "", origin(path, result), ""]
    if "odd" in results:
        path, result = results["odd"]
        lines += ["Short and odd shapes, microseconds of a call in a row of calls, the host's time included:", ""]
        lines += [*odd_table(result), "", origin(path, result), ""]
    if "ablation" in results:
        path, result = results["ablation"]
        lines += [f"![{PICTURES['ablation'][1]}](docs/images/ablation.png)", "", origin(path, result), ""]
    if "host" in results:
        path, result = results["host"]
        lines += ["Host time of one call in microseconds, GPU not waited for:", "", *host_table(result), ""]
        lines += [origin(path, result), ""]
    return "\n".join([*lines, END])


def updated(readme: str, new_block: str) -> str:
    """The README with its block replaced. Raises ``ValueError`` if the markers are not there once each."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"{README.name} must hold each of the markers {BEGIN!r} and {END!r} once")
    before, rest = readme.split(BEGIN)
    return before + new_block + rest.split(END)[1]


def main() -> int:
    """Write, or check, README and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    results = latest(RESULTS)
    readme = README.read_text()
    wanted = updated(readme, block(results))
    if args.check:
        missing = [
            PICTURES[kind][0] for kind in results if kind in PICTURES and not (IMAGES / PICTURES[kind][0]).exists()
        ]
        if readme != wanted or missing:
            print(f"README.md or {missing} not up to date: run `make figures`", file=sys.stderr)
            return 1
        return 0
    from fa3.cli import plots

    for kind, (path, result) in results.items():
        if kind not in PICTURES:
            continue
        plots.save(plots.figure_of(result), IMAGES / PICTURES[kind][0])
        print(f"docs/images/{PICTURES[kind][0]} from {path.name}")
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
