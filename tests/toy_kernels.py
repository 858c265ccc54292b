"""A kernel of three lines, for tests of the way from spec to loaded function."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ToySpec:
    """Scale ``n`` floats; ``threads`` is fixed when compiled."""

    threads: int = 128
    broken: bool = False

    @property
    def name(self) -> str:
        return f"toy_{self.threads}" + ("_broken" if self.broken else "")

    @property
    def shared_bytes(self) -> int:
        return 0

    def as_dict(self) -> dict[str, Any]:
        return {"kernel": "toy", **asdict(self)}


def spec_from_dict(fields: dict[str, Any]) -> ToySpec:
    return ToySpec(**{name: value for name, value in fields.items() if name != "kernel"})


def entry_symbol(spec: ToySpec) -> str:
    return spec.name


def compile_spec(spec: ToySpec, options: str) -> Any:
    if spec.broken:
        raise ValueError("this toy is broken")
    import cutlass
    import cutlass.cute as cute

    toy_scale = importlib.import_module("toy_scale")
    return cute.compile(
        toy_scale.scale,
        cutlass.Int64(0),
        cutlass.Int64(0),
        cutlass.Int32(0),
        cutlass.Float32(0),
        spec.threads,
        cute.runtime.make_fake_stream(),
        options=options,
    )
