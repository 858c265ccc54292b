"""``fa3 bench --fp8``: what it measures, what it writes, and the figures made of that."""

import json
import math
import weakref

import pytest
import torch

import fa3
from command_line import empty_store, figures_script, on_cpu, result  # noqa: F401
from fa3.cli import fp8_speed, measure, peers, plots, timing
from fa3.cli.main import main
from fa3.fp8_ops import fp8_options
from fa3.options import Options
from fa3.plan import H200, fp8_specs, plan
from fa3.presets import shipped_specs
from fa3.problem import check_forward
from fa3.quantization import E4M3, default_block, rope_rows
from fa3.quantize_plan import plan_quantize

CPU = torch.device("cpu")
FA3 = peers.Impl("fa3", "1", fp8_speed._bf16)


@pytest.fixture
def official(monkeypatch):
    """An official kernel as it is found on a GPU; it answers as fa3 does, and notes what it was given."""
    given = []

    def function(q, k, v, causal, q_descale, k_descale, v_descale):
        given.append((q, q_descale))
        scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        return fa3.flash_attn_func(q, k, v, causal=causal, **scales), torch.zeros(1)

    monkeypatch.setattr(fp8_speed, "official_function", lambda: function)
    return peers.Impl("official", "fa3-fwd 1", fp8_speed._bf16), given


def measured(impls, jobs=None):
    """The rows of each job on the CPU, and the head of their file."""
    head = {"notes": [], "rows": []}
    wanted = fp8_speed.jobs(quick=True) if jobs is None else jobs
    return list(fp8_speed.measure(CPU, wanted, impls, timing.Sensors(CPU), head, quick=True)), head


class TestTheCommand:
    @on_cpu
    def test_a_quick_run_on_a_cpu_writes_a_result_file_with_all_parts(self, tmp_path, capsys):
        file = tmp_path / "results" / "fp8.json"
        assert main(["bench", "--fp8", "--quick", "--commit", "abc", "--json", str(file)]) == 0
        written = json.loads(file.read_text())
        assert (written["kind"], written["commit"], written["gpu"]) == ("fp8-speed", "abc", None)
        assert written["rope"] == "PyTorch, one operator at a time"
        assert {"driver", "torch", "cutlass", "fa3", "date", "command"} <= set(written)
        names = {part: {row["impl"] for row in written["rows"] if row["part"] == part} for part in fp8_speed.PARTS}
        assert names == {
            "attention": set(fp8_speed.ATTENTION) - {"official"},
            "quantize": set(fp8_speed.PASSES),
            "end-to-end": set(fp8_speed.END_TO_END),
        }
        assert all(row["ms"] > 0 and row["regime"] == "burst" for row in written["rows"])
        # Nobody differs from the first one: no note is about that.
        assert written["notes"] == ["no GPU", "fa3 is its tiled backend here"]
        out = capsys.readouterr().out
        assert "attention 64-causal-128: fa3-rows " in out
        assert "geometric means: fp8 x" in out
        assert "not measured: official: needs a GPU" in out
        assert "not measured: fa3" not in out

    @pytest.mark.parametrize("arguments", [[], ["--limit", "5"]])
    def test_without_a_hopper_gpu_it_says_so(self, monkeypatch, capsys, tmp_path, arguments):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        file = tmp_path / "never.json"
        assert main(["bench", "--fp8", *arguments, "--json", str(file)]) == 2
        assert capsys.readouterr().err == "fa3 bench: --fp8 measures fa3's own kernels: it needs a Hopper GPU\n"
        assert not file.exists()

    @on_cpu
    def test_the_time_limit_stops_between_jobs_and_says_so(self, tmp_path):
        file = tmp_path / "fp8.json"
        assert main(["bench", "--fp8", "--quick", "--limit", "-1", "--json", str(file)]) == 1
        written = json.loads(file.read_text())
        assert written["rows"] == []
        assert written["notes"][-1] == "stopped after -1 s: 4 shapes not measured"

    @pytest.mark.parametrize(
        ("arguments", "refusal"),
        [
            (["--cells", "128-full-512"], "--cells: --fp8 has no use for it"),
            (["--impls", "fa3"], "--impls: --fp8 has no use for it"),
            (["--png", "a.png"], "--png: --fp8 has no use for it"),
            (["--direction", "bwd"], "--direction bwd: --fp8 measures the forward alone"),
            (["--dtype", "bf16"], "--fp8 --dtype bf16: it measures e4m3, and bf16 beside it"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_an_option_that_would_change_nothing_is_refused(self, capsys, arguments, refusal):
        assert main(["bench", "--fp8", "--quick", *arguments]) == 2
        assert capsys.readouterr().err == f"fa3 bench: {refusal}\n"


class TestJobs:
    def test_a_run_has_16k_tokens_of_2048_columns_and_every_length(self):
        jobs = fp8_speed.jobs()
        assert len(set(jobs)) == len(jobs) == 34 + 3 + 30
        assert [job.part for job in jobs] == ["attention"] * 34 + ["quantize"] * 3 + ["end-to-end"] * 30
        for job in jobs:
            assert job.cell.batch * job.cell.seqlen == 16384
            assert 2048 - job.cell.head_dim < job.cell.heads * job.cell.head_dim <= 2048
        others = {(job.cell.head_dim, job.cell.seqlen) for job in jobs if job.cell.head_dim in (96, 192)}
        assert others == {(96, 4096), (192, 4096)}

    def test_what_a_run_asks_for_is_shipped(self, monkeypatch):
        """Else minutes of compiling would count for the time limit."""
        asked, passes = set(), set()

        def attend(x, causal, two_level):
            options = Options(fp8=fp8_options(x, "bf16", two_level))
            asked.add(plan(check_forward(x.q, x.k, x.v, causal=causal, options=options), H200).spec)

        monkeypatch.setattr(fa3, "flash_attn_quantized_func", attend)
        for job in fp8_speed.jobs():
            cell = job.cell
            if job.part != "attention":
                continue
            q = torch.empty(cell.batch, cell.seqlen, cell.heads, cell.head_dim, device="meta")
            for impl in fp8_speed.attention_impls(cell.head_dim, None):
                if impl.name != "fa3-bf16":
                    impl.prepare(q, q, q, cell.causal)()
        assert len(asked) > 20
        assert asked <= set(fp8_specs())

        def quantize(x, **options):
            del options["seed"], options["first_position"]
            options["rope"] = "fp32" if options["rope"] else ""
            batch, seqlen, heads, head_dim = x.shape
            planned = plan_quantize(
                dtype="bf16", batch=batch, seqlen=seqlen, heads=heads, head_dim=head_dim, facts=H200, **options
            )
            passes.update({planned.spec, planned.amax} - {None})
            return x, x

        monkeypatch.setattr(fp8_speed, "quantize_tensor", quantize)
        monkeypatch.setattr(fp8_speed, "SETS", 1)
        for head_dim in fp8_speed.HEAD_DIMS:
            fp8_speed.quantize_passes(measure.make_cell(head_dim, False, 4096, 16384, 2048), torch.device("meta"))
        assert len(passes) > 12
        assert passes <= set(shipped_specs("fp8"))


class TestAttention:
    def test_the_official_kernel_comes_first_with_scales_of_one_and_others_are_compared_with_it(self, official):
        impl, given = official
        (rows, *_), head = measured([FA3, impl], fp8_speed.jobs(quick=True)[:1])
        assert head["notes"] == []
        assert [row["impl"] for row in rows] == list(fp8_speed.ATTENTION)
        official_ms = rows[0]["ms"]
        for row in rows:
            assert row["to_official"] == pytest.approx(official_ms / row["ms"], abs=1e-3, rel=1e-2)
            assert row["dtype"] == ("bf16" if row["impl"] == "fa3-bf16" else "e4m3")
            assert row["part"] == "attention"
        q, scale = given[0]
        assert q.dtype is E4M3
        assert scale.tolist() == [[1.0, 1.0]] * 2

    def test_what_differs_more_than_rounding_explains_is_noted(self, official, monkeypatch):
        impl, _ = official
        monkeypatch.setattr(
            fp8_speed, "official_function", lambda: lambda q, k, v, causal, **scales: v.bfloat16().roll(1, 1)
        )
        _, head = measured([impl], fp8_speed.jobs(quick=True)[:1])
        assert len(head["notes"]) == 6
        assert all("differs from official" in note and "of the norm" in note for note in head["notes"])
        nothing = torch.full((2, 2), math.nan)
        assert fp8_speed._differs(impl, nothing, torch.ones(2, 2), impl) is not None

    def test_head_dims_have_the_implementations_that_have_kernels(self, official):
        impl, _ = official
        names = {d: [one.name for one in fp8_speed.attention_impls(d, impl)] for d in (64, 96, 192, 256)}
        assert all(names[d] == list(fp8_speed.ATTENTION) for d in (64, 256))
        assert names[96] == names[192] == ["official", "fa3-rows", "fa3-bf16"]
        assert "official" not in [one.name for one in fp8_speed.attention_impls(64, None)]

    def test_inputs_hold_numbers_of_e4m3_that_all_get(self):
        ((q, k, v),) = fp8_speed.e4m3_inputs(measure.make_cell(128, False, 200, 200, 128), CPU)
        for x in (q, k, v):
            assert x.dtype is torch.bfloat16
            assert torch.equal(x.to(E4M3).bfloat16(), x)
        for layout, blocks in (("row", False), ("transposed", False), ("transposed", True)):
            x = fp8_speed.of_ones(q, k, v, layout, blocks)
            assert x.block == (default_block(128) if blocks else "head")
            for mine, given in zip(x.dequantize(), (q, k, v), strict=True):
                assert torch.equal(mine, given.float())

    def test_where_nothing_can_be_computed_there_are_no_rows(self, monkeypatch):
        def broken(*arguments, **options):
            raise RuntimeError("no kernel image")

        monkeypatch.setattr(fa3, "flash_attn_quantized_func", broken)
        monkeypatch.setattr(fa3, "flash_attn_func", broken)
        groups, head = measured([], fp8_speed.jobs(quick=True)[:1])
        assert groups == []
        assert "attention" not in head
        assert len(head["notes"]) == 6


class TestQuantize:
    def test_bytes_are_those_of_all_that_is_read_and_written(self):
        cell = measure.make_cell(128, False, 256, 512, 256)
        values = 2 * 256 * 2 * 128
        passes = {name: moved for name, (_, moved) in fp8_speed.quantize_passes(cell, CPU).items()}
        # 2 batches and 2 heads of 4 blocks of queries, 3 of keys; angles once for all heads and batches.
        assert passes["q-blocks"] == 3 * values + 4 * 2 * 2 * 4
        assert passes["q-blocks-rope"] == passes["q-int8-rope"] == passes["q-blocks"] + 2 * 4 * 256 * 64
        assert passes["k-blocks-rope"] == 3 * values + 4 * 2 * 2 * 3 + 2 * 4 * 256 * 64
        assert passes["v-rows"] == passes["v-transposed"] == 3 * values + 4 * 2 * 2 * 3
        assert passes["q-head"] == 3 * values + 4 * 2 * 2
        assert passes["copy"] == passes["q-blocks"]

    def test_a_share_is_of_the_bytes_a_second_of_the_copy(self):
        ((*rows, copy),), _ = measured([], fp8_speed.jobs(quick=True)[2:3])
        assert (copy["impl"], copy["of_copy"]) == ("copy", 1.0)
        for row in rows:
            share = row["bytes"] / row["ms"] / (copy["bytes"] / copy["ms"])
            assert row["of_copy"] == pytest.approx(share, rel=1e-2, abs=1e-3)
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6, rel=1e-2, abs=1e-3)

    def test_a_result_stays_until_the_next_is_there_so_that_it_gets_other_memory(self):
        alive, most = weakref.WeakSet(), []

        class Answer:
            def __init__(self):
                alive.add(self)
                most.append(len(alive))

        call = fp8_speed._keeping(Answer)
        for _ in range(3):
            call()
        assert most == [1, 2, 2]


class TestEndToEnd:
    def test_both_rotate_as_the_definition_of_rope_says(self):
        q, k = (torch.randn(2, 24, 3, 32).bfloat16() for _ in range(2))
        cos, sin = fp8_speed.rope_tables(24, 32, CPU)
        angles = *fp8_speed.rope_tables(48, 32, CPU), torch.arange(24).repeat(2)
        rotated = fp8_speed.rotate_tokens(q.view(48, 3, 32), k.view(48, 3, 32), *angles)
        for mine, x in zip(rotated, (q, k), strict=True):
            assert mine.dtype is torch.bfloat16
            assert torch.equal(mine.view(x.shape), rope_rows(x, (cos, sin)).bfloat16())

    def test_the_rows_are_ratios_to_bf16(self):
        ((bf16, fp8, one_level, int8),), head = measured([], fp8_speed.jobs(quick=True)[3:])
        assert head["notes"] == []
        assert (bf16["impl"], bf16["dtype"], bf16["to_bf16"]) == ("bf16", "bf16", 1.0)
        assert (fp8["impl"], fp8["dtype"]) == ("fp8", "e4m3")
        assert (one_level["impl"], one_level["dtype"]) == ("fp8-one-level", "e4m3")
        assert (int8["impl"], int8["dtype"]) == ("fp8-int8", "e4m3")
        assert fp8["to_bf16"] == pytest.approx(bf16["ms"] / fp8["ms"], rel=1e-2, abs=1e-3)

    def test_a_rotation_that_cannot_be_compiled_is_noted_and_done_without(self, monkeypatch):
        def compile_(function, dynamic):
            def fails(*tensors):
                raise RuntimeError("no C compiler\nmore words")

            return fails

        monkeypatch.setattr(torch, "compile", compile_)
        rotation = fp8_speed.Rotation(torch.device("cuda"), [])
        rotation.choose(torch.zeros(1))
        rotation.choose(torch.zeros(1))
        assert rotation.notes == ["rotary embedding not compiled: RuntimeError: no C compiler"]
        assert rotation.function is fp8_speed.rotate_tokens
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *tensors: function)
        rotation = fp8_speed.Rotation(torch.device("cuda"), [])
        rotation.choose(torch.zeros(1))
        assert (rotation.name, rotation.notes) == ("torch.compile", [])
        assert rotation.function is not fp8_speed.rotate_tokens


def attention_rows(d, s, regime="burst", **speeds):
    """Rows of a cell: name with _ for - -> TFLOPS."""
    shape = {"d": d, "dv": d, "causal": False, "b": 1, "s": s, "h": 16, "hk": 16, "regime": regime}
    watts = 690.0 if regime == "steady" else None
    return [
        {
            "part": "attention", "impl": name.replace("_", "-"), "dtype": "bf16" if name.endswith("bf16") else "e4m3",
            **shape, "ms": 1e3 / tflops, "tflops": tflops, "clock_mhz": 1500.0, "watts": watts,
            "to_official": round(tflops / speeds["official"], 4) if "official" in speeds else None,
        }
        for name, tflops in speeds.items()
    ]  # fmt: skip


def other_rows(part, d, **fields):
    return [{"part": part, "d": d, "s": 4096, "causal": True, "regime": "burst", **fields}]


ROWS = [
    *attention_rows(64, 1024, official=400.0, fa3_rows=500.0, fa3_bf16=900.0),
    *attention_rows(128, 16384, official=1000.0, fa3_rows=1010.0, fa3_transposed=1250.0, fa3_bf16=640.0),
    *attention_rows(128, 8192, official=777.0),
    *attention_rows(128, 1024, fa3_rows=600.0),
    *attention_rows(128, 16384, "steady", official=900.0, fa3_rows=990.0),
    *other_rows("quantize", 64, impl="q-blocks", gb_per_s=3900.4, of_copy=0.95),
    *other_rows("quantize", 64, impl="copy", gb_per_s=4100.0, of_copy=1.0),
    *other_rows("end-to-end", 128, impl="bf16", ms=2.0, to_bf16=1.0),
    *other_rows("end-to-end", 128, impl="fp8", ms=1.25, to_bf16=1.6),
]


class TestFigures:
    def block(self, folder, rows):
        (folder / "fp8.json").write_text(json.dumps({**result("fp8-speed", rows), "rope": "torch.compile"}))
        script = figures_script()
        return script.fp8_speed_block(script.latest(folder))

    def test_the_page_has_a_table_for_each_part(self, tmp_path):
        block = self.block(tmp_path, ROWS)
        assert "| head dim | mask | sequence | official | v in rows | V^T | bf16 | rows / official | best / " in block
        assert "| 64 | full | 1024 | 400 | 500 |  | **900** | 1.25 | 1.25 |" in block
        assert "| 128 | full | 16384 | 1000 | 1010 | **1250** | 640 | 1.01 | 1.25 |" in block
        assert "| 128 | full | 1024 |  | **600** |  |  |  |  |" in block
        assert "777" not in block
        assert "| 128 | full | 16384 | 900 (1500 MHz, 690 W) | **990** (1500 MHz, 690 W) | 1.10 | 1.10 |" in block
        assert "| q, rotated, a scale a block | 3900 (0.95) |" in block
        assert "| 128 | causal | 2.00 → 1.25 (1.60) |" in block
        assert "by torch.compile and" in block
        assert "images/fp8-speed.svg" in block
        assert "(../benchmarks/results/fp8.json)" in block

    def test_parts_that_a_run_did_not_reach_are_left_out(self, tmp_path):
        block = self.block(tmp_path, ROWS[:3])
        assert "| 64 | full | 1024 | 400 |" in block
        assert "steady" not in block
        assert "copy" not in block
        assert "RoPE" not in block

    def test_the_picture_has_a_panel_for_each_head_dim_and_is_the_same_each_time(self, tmp_path):
        for name in ("first.svg", "second.svg"):
            figure = plots.figure_of(result("fp8-speed", ROWS))
            plots.save(figure, tmp_path / name)
        # At head dim 64 one length alone was measured.
        assert [axes.get_title() for axes in figure.axes] == ["head dim 128, full, bf16/e4m3"]
        assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
        with pytest.raises(ValueError, match="no rows of attention"):
            plots.figure_of(result("fp8-speed", ROWS[-1:]))

    def test_a_line_of_text_names_times_speeds_and_ratios(self):
        steady = [row for row in ROWS if row["regime"] == "steady"]
        assert fp8_speed.describe(steady) == (
            "attention 128-full-16384: official steady 1.111 ms 900 TFLOPS 1500 MHz 690 W x1.000"
            "  fa3-rows steady 1.010 ms 990 TFLOPS 1500 MHz 690 W x1.100"
        )
        passes = [{"ms": 0.025, **row} for row in ROWS if row["part"] == "quantize"]
        assert fp8_speed.describe(passes) == (
            "quantize 64-4096, share of a copy's bytes a second: q-blocks 25.0 us 0.95  copy 25.0 us 1.00"
        )
        # Geometric means of bursts alone: of 1.25 and 1.01.
        assert fp8_speed.summary(ROWS) == (
            "geometric means: fa3-rows x1.124 official (2 cells), fa3-transposed x1.250 official (1 cells), "
            "fa3-bf16 x1.200 official (2 cells), fp8 x1.600 bf16 (1 cells)"
        )
