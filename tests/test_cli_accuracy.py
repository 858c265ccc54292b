"""``fa3 accuracy``: what it compares with what, and what it writes."""

import itertools
import json

import pytest
import torch

import fa3
from command_line import empty_store, figures_script, on_cpu, result  # noqa: F401
from fa3 import fp8, fp8_ops
from fa3.cli import accuracy, peers, plots
from fa3.cli.main import main
from fa3.numerics.fp8_error import CHOICES, emulate, rmse
from fa3.plan import H200, plan
from fa3.presets import shipped_specs
from fa3.problem import Problem
from fa3.quantization import TWO_LEVEL_KEYS, default_block, rope_rows
from fa3.quantize_plan import plan_quantize

CPU = torch.device("cpu")


def case(data="paper", head_dim=64, seqlen=200, heads=2, queries=32, seed=3, seeds=1):
    return accuracy.Case(data, head_dim, seqlen, heads, queries, seed, seeds)


def error_of(experiment, out):
    """Root of the mean over heads."""
    return experiment.errors(out).mean().sqrt().item()


class TestTheCommand:
    @on_cpu
    def test_without_a_gpu_it_writes_a_result_file_with_the_emulation(self, tmp_path, capsys):
        file = tmp_path / "results" / "accuracy.json"
        arguments = ["accuracy", "--data", "paper,key-channels-rope", "--head-dims", "64", "--seqlens", "128,256"]
        assert main([*arguments, "--heads", "1", "--queries", "64", "--seed", "5", "--json", str(file)]) == 0
        written = json.loads(file.read_text())
        assert {"gpu", "driver", "torch", "cutlass", "fa3", "commit", "date", "command"} <= set(written)
        assert (written["kind"], written["seed"], written["gpu"]) == ("accuracy", 5, None)
        assert len(written["rows"]) == 2 * 2 * (1 + len(CHOICES))
        assert {row["impl"] for row in written["rows"]} == {"eager", "exact sums"}
        assert all(0 < row["rmse"] < 0.1 for row in written["rows"])
        out = capsys.readouterr().out
        assert "CPU, paper, head dim 64" in out
        assert "exact sums e4m3, block, incoherent" in out
        assert "seed 5, of data, queries and signs" in out
        assert "not measured: official: needs a GPU" in out

    @on_cpu
    def test_seeds_behind_the_first_are_told(self, capsys):
        arguments = ["accuracy", "--data", "paper", "--head-dims", "16", "--seqlens", "32", "--heads", "1"]
        assert main([*arguments, "--seeds", "2"]) == 0
        assert "seed 0 and the next, of data, queries and signs" in capsys.readouterr().out

    @on_cpu
    def test_after_the_time_limit_no_case_begins_and_the_file_says_so(self, tmp_path):
        file = tmp_path / "accuracy.json"
        assert main(["accuracy", "--limit", "-1", "--json", str(file)]) == 1
        written = json.loads(file.read_text())
        assert written["rows"] == []
        assert written["notes"][-1] == "stopped after -1 s: 24 cases not measured"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--data", "papers"], "--data 'papers': allowed are paper, offset, channels, channels-rope"),
            (["--head-dims", "72"], "--head-dims 72: allowed are the multiples of 16 up to 256"),
            (["--head-dims", "272"], "--head-dims 272"),
            (["--seqlens", "1k"], "--seqlens '1k': expected positive integers"),
            (["--heads", "0"], "--heads 0: must be at least 1"),
            (["--queries", "0"], "--queries 0: must be at least 1"),
            (["--seeds", "0"], "--seeds 0: must be at least 1"),
            (["--seed", "-1"], "--seed -1: must be from 0"),
            (["--seed", "2147483646", "--seeds", "3"], "--seed 2147483646: must be from 0 to 2**31 - 3"),
            (["--json", "/"], "--json /: a folder"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, words, capsys):
        assert main(["accuracy", *arguments]) == 2
        assert words in capsys.readouterr().err

    def test_on_a_gpu_the_paper_has_all_lengths_and_comes_first(self):
        args = accuracy_args()
        cases = accuracy.choose_cases(args, on_gpu=True)
        assert [one.seqlen for one in cases[:8]] == [1024 << i for i in range(8)]
        assert {one.data for one in cases[:24]} == {"paper"}
        assert {(one.data, one.head_dim) for one in cases} == {(d, n) for d in accuracy.DATA for n in (64, 128, 256)}
        assert accuracy.choose_cases(accuracy_args("--seqlens", "512"), on_gpu=True)[0].seqlen == 512

    def test_long_rows_have_fewer_seeds_unless_it_is_said_how_many(self):
        seeds = {one.seqlen: one.seeds for one in accuracy.choose_cases(accuracy_args(), on_gpu=True)}
        assert seeds[16384] == accuracy.SEEDS > seeds[32768] == accuracy.FEW_SEEDS > 1
        assert {one.seeds for one in accuracy.choose_cases(accuracy_args("--seeds", "3"), on_gpu=True)} == {3}
        assert {one.seeds for one in accuracy.choose_cases(accuracy_args(), on_gpu=False)} == {1}


def accuracy_args(*arguments):
    from fa3.cli.main import parser

    return parser().parse_args(["accuracy", *arguments])


class TestACase:
    @pytest.mark.parametrize("data", list(accuracy.DATA))
    def test_the_reference_is_float64_attention_of_some_queries(self, data):
        experiment = accuracy.Experiment(case(data), CPU)
        q, k, v = experiment.q.double(), experiment.k.double(), experiment.v.double()
        if data.endswith("rope"):
            rope = accuracy.rope_tables(200, 64, CPU)
            q, k = rope_rows(q, rope), rope_rows(k, rope)
        expected = fa3.reference(q, k, v)[0]
        torch.testing.assert_close(experiment.expected, expected[:, experiment.queries])
        assert error_of(experiment, expected) < 1e-12
        offset = torch.tensor([0.5, 0.25])[:, None]
        torch.testing.assert_close(
            experiment.errors(expected[:, experiment.queries] + offset), torch.tensor([0.25, 0.0625]).double()
        )
        assert experiment.queries.unique().numel() == 32

    def test_fewer_rows_than_queries_are_all_compared(self):
        experiment = accuracy.Experiment(case(seqlen=20), CPU)
        assert experiment.queries.tolist() == list(range(20))

    @pytest.mark.parametrize("choice", CHOICES)
    def test_heads_and_chunks_of_queries_are_emulated_one_by_one_as_they_are_together(self, choice, monkeypatch):
        monkeypatch.setattr(accuracy, "CHUNK_SCORES", 5 * 200)
        experiment = accuracy.Experiment(case("channels-rope"), CPU)
        x = experiment.quantized(choice)
        together = emulate(x)[:, experiment.queries]
        expected = [rmse(together[:, :, head], experiment.expected[:, :, head]) ** 2 for head in range(2)]
        assert experiment.exact_sums(x).tolist() == pytest.approx(expected, rel=1e-9)
        assert (x.seed is not None) == CHOICES[choice].incoherent

    def test_eager_attention_rounds_to_16_bits_and_is_near_the_reference(self):
        experiment = accuracy.Experiment(case(), CPU)
        out = accuracy.eager(*experiment.rounded(torch.float16))
        assert out.dtype is torch.float16
        assert 1e-5 < error_of(experiment, out) < 5e-4

    def test_rotary_angles_turn_by_their_position(self):
        cos, sin = accuracy.rope_tables(5, 8, CPU)
        assert cos.shape == sin.shape == (5, 4)
        torch.testing.assert_close(cos[3], torch.tensor([3.0, 0.3, 0.03, 0.003]).cos())
        torch.testing.assert_close(sin[3], torch.tensor([3.0, 0.3, 0.03, 0.003]).sin())


class TestKernels:
    """Lines of a GPU, whose functions run on the CPU as well."""

    @pytest.fixture
    def rows(self, monkeypatch):
        """Rows of a case as on a GPU, with an official kernel that answers as fa3 does, but for 256 columns."""

        def official(q, k, v, q_descale, k_descale, v_descale):
            if q.shape[3] == 256:
                raise RuntimeError("no such kernel\nmore words")
            return fa3.flash_attn_func(
                q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
            ), torch.zeros(1)

        def measure(one):
            measured = accuracy.Measured([])
            accuracy.measure(one, CPU, official, measured, kernels=True)
            return measured

        return measure

    def test_every_kernel_is_compared_with_the_emulation_of_its_own_tensors(self, rows):
        measured = rows(case("channels"))
        assert measured.failed == {}
        found = {accuracy.label_of(row): row for row in measured.rows}
        assert len(found) == len(measured.rows) == 3 + 3 * len(CHOICES) + 2
        for choice in CHOICES:
            exact_sums = found[f"exact sums e4m3, {choice}"]["rmse"]
            for level in ("one level", "two levels"):
                row = found[f"fa3 e4m3, {choice}, {level}"]
                assert row["to_exact_sums"] == pytest.approx(row["rmse"] / exact_sums, rel=2e-3)
                assert 0.7 < row["to_exact_sums"] < 1.3
        for choice in ("tensor", "tensor, incoherent"):
            assert found[f"official e4m3, {choice}"]["rmse"] == found[f"fa3 e4m3, {choice}, one level"]["rmse"]
        assert found["fa3 fp16"]["rmse"] < found["fa3 bf16"]["rmse"] < found["fa3 e4m3, tensor, one level"]["rmse"]

    def test_errors_are_pooled_over_seeds_and_compared_with_the_official_kernel_on_the_same_data(self, rows):
        both = {accuracy.label_of(row): row for row in rows(case(seeds=2)).rows}
        first, second = ({accuracy.label_of(row): row for row in rows(case(seed=n)).rows} for n in (3, 4))
        for label, row in both.items():
            mean = (first[label]["rmse"] ** 2 + second[label]["rmse"] ** 2) / 2
            assert row["rmse"] == pytest.approx(mean**0.5, rel=1e-3)
            assert 0 < row["rmse_error"] < row["rmse"]
            assert row["seeds"] == 2
            if label.startswith("fa3 e4m3"):
                official = both["official e4m3, tensor" + (", incoherent" if row["incoherent"] else "")]
                assert row["to_official"] == pytest.approx(row["rmse"] / official["rmse"], rel=2e-3)
                assert row["to_official_error"] is not None
            else:
                assert row["to_official"] is row["to_official_error"] is None
        assert both["fa3 e4m3, tensor, one level"]["to_official"] == 1
        assert both["fa3 e4m3, tensor, one level"]["to_official_error"] == 0

    def test_what_fails_is_noted_and_the_others_are_measured(self, rows):
        measured = rows(case(head_dim=256, seqlen=64))
        assert measured.failed == {
            f"official e4m3, {choice}: RuntimeError: no such kernel": ["paper 256-64"]
            for choice in ("tensor", "tensor, incoherent")
        }
        assert len(measured.rows) == 3 + 3 * len(CHOICES)


class TestThePreset:
    """``fa3 compile --preset accuracy`` has every kernel that a run on an H200 asks for."""

    @pytest.mark.parametrize("long", [False, True])
    @pytest.mark.parametrize("data", ["paper", "channels-rope"])
    def test_it_quantizes_in_every_way(self, data, long, monkeypatch):
        # Twenty keys as if they were many.
        if long:
            monkeypatch.setattr(fp8, "TWO_LEVEL_KEYS", 1)
        specs, planned = set(shipped_specs("accuracy")), []
        definition = fp8_ops.quantize_tensor

        def quantize(x, *, seed, first_position, rope, **arguments):
            assert (x.dtype, first_position) == (torch.bfloat16, 0)
            call = {**arguments, "rows": "head" if arguments["rows"] == "tensor" else arguments["rows"]}
            plan = plan_quantize(
                **call, rope="fp32" if rope else "", dtype="bf16", batch=x.shape[0], seqlen=x.shape[1],
                heads=x.shape[2], head_dim=x.shape[3], facts=H200,
            )  # fmt: skip
            planned.extend([plan.spec, *([plan.amax] if plan.amax else [])])
            return definition(x, seed=seed, first_position=first_position, rope=rope, **arguments)

        monkeypatch.setattr(fp8_ops, "quantize_tensor", quantize)
        for head_dim in accuracy.HEAD_DIMS:
            experiment = accuracy.Experiment(case(data, head_dim, seqlen=20), CPU)
            for choice in CHOICES:
                experiment.quantized(choice)
        assert set(planned) <= specs
        assert {spec.rope for spec in planned} == ({"", "fp32"} if data == "channels-rope" else {""})

    def test_it_attends_in_every_way(self):
        specs = set(shipped_specs("accuracy"))
        for head_dim, seqlen in itertools.product(accuracy.HEAD_DIMS, accuracy.SEQLENS):
            sizes = {
                "batch": 1, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": accuracy.HEADS,
                "heads_kv": accuracy.HEADS, "head_dim": head_dim, "head_dim_v": head_dim, "causal": False,
                "softmax_scale": head_dim**-0.5,
            }  # fmt: skip
            for dtype in ("fp16", "bf16"):
                assert plan(Problem(**sizes, dtype=dtype), H200).spec in specs
            blocks = (0, 0), default_block(head_dim, seqlen > TWO_LEVEL_KEYS)
            for (q_block, k_block), two_level in itertools.product(blocks, (False, True)):
                problem = Problem(
                    **sizes, dtype="e4m3", out_dtype="bf16", q_block=q_block, k_block=k_block,
                    v_transposed=bool(k_block), two_level=two_level,
                )  # fmt: skip
                assert plan(problem, H200).spec in specs


def test_the_official_function_is_that_of_the_package_that_is_found(monkeypatch):
    monkeypatch.setattr(peers, "OFFICIAL", (("no_such_module", "none"), ("fa3", "fa3")))
    assert peers.official_function() is fa3.flash_attn_func
    monkeypatch.setattr(peers, "OFFICIAL", (("no_such_module", "none"),))
    assert peers.official_function() is None


def rows_of(data="paper", head_dim=128, seqlen=8192, **errors):
    """Rows of one case: label with _ for spaces, commas left out -> errors of two heads."""
    lines = {
        "fa3_fp16": accuracy.Line("fa3", "fp16"),
        "official": accuracy.Line("official", "e4m3", "tensor, incoherent"),
        "one_level": accuracy.Line("fa3", "e4m3", "block, incoherent", False),
        "two_levels": accuracy.Line("fa3", "e4m3", "block, incoherent", True),
        "exact": accuracy.Line("exact sums", "e4m3", "block, incoherent"),
    }
    found = {lines[name]: torch.tensor(of_heads).double().square() for name, of_heads in errors.items()}
    return [accuracy._row(case(data, head_dim, seqlen), line, found) for line in found]


def two(error):
    return (error, error)


ROWS = [
    *rows_of(fa3_fp16=two(2e-4), official=(1e-2, 0), one_level=two(9e-3), two_levels=two(7.5e-3), exact=two(6e-3)),
    *rows_of(seqlen=1024, two_levels=two(5e-3), exact=two(5e-3), official=two(6.25e-3)),
    *rows_of(seqlen=2048, two_levels=two(5.5e-3)),
    *rows_of("channels", two_levels=two(1.25e-2), exact=two(1e-2)),
]


class TestFigures:
    def test_the_page_has_errors_ratios_and_the_best_of_e4m3(self, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(result("accuracy", ROWS)))
        script = figures_script()
        block = script.accuracy_block(script.latest(tmp_path))
        assert "| | d 128, 1024 | d 128, 8192 |" in block
        assert "| fa3 fp16 |  | 2.00e-04 |" in block
        assert "| official e4m3, tensor, incoherent | 6.25e-03 | **7.07e-03** |" in block
        assert "| fa3 e4m3, block, incoherent, one level |  | 9.00e-03 (1.50) |" in block
        assert "| fa3 e4m3, block, incoherent, two levels | **5.00e-03** (1.00) | 7.50e-03 (1.25) |" in block
        assert "| exact sums e4m3, block, incoherent | 5.00e-03 | 6.00e-03 |" in block
        assert "| | paper | channels |" in block
        assert "| fa3 e4m3, block, incoherent, two levels | 7.50e-03 (1.25) | **1.25e-02** (1.25) |" in block
        assert "| | head dim | 1024 | 8192 |" in block
        # One of the two heads of the official kernel has no error, so nothing is known of the ratio but its middle.
        assert "| fa3 e4m3, block, incoherent, two levels | 128 | 0.800 ± 0.000 | 1.061 ± " in block
        assert "(../benchmarks/results/a.json)" in block

    def test_without_result_files_the_page_says_so(self, tmp_path):
        script = figures_script()
        assert "Not measured yet" in script.accuracy_block(script.latest(tmp_path))
        assert "Not measured yet" in script.fp8_speed_block(script.latest(tmp_path))

    def test_the_picture_has_a_curve_for_each_line_and_is_the_same_each_time(self, tmp_path):
        for name in ("first.svg", "second.svg"):
            figure = plots.figure_of(result("accuracy", ROWS))
            plots.save(figure, tmp_path / name)
        assert [len(axes.lines) for axes in figure.axes] == [5]
        assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
        assert (tmp_path / "first.svg").read_text().startswith("<?xml")
