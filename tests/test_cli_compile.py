"""``fa3 compile``: which specs it asks for, what it says of them, and how it says no. Nothing is compiled here."""

import pytest

from command_line import empty_store  # noqa: F401
from fa3.cli import compile as command
from fa3.cli.main import main
from fa3.compiler.build import Outcome
from fa3.errors import CompileError
from fa3.presets import PRESETS, shipped_specs


@pytest.fixture
def compiler(monkeypatch):
    """Specs that were asked for, and the name of one that fails, or None."""
    asked = {"specs": [], "jobs": None, "fails": None}

    def compile_many(specs, store, jobs, progress):
        asked["specs"], asked["jobs"] = list(specs), jobs
        outcomes = []
        for number, spec in enumerate(specs):
            error = CompileError(f"{spec.name}: too many registers") if spec.name == asked["fails"] else None
            outcomes.append(Outcome(spec, None if error else {}, error, 0.5, was_there=number % 2 == 1))
            progress(outcomes[-1])
        return outcomes

    monkeypatch.setattr(command, "compile_many", compile_many)
    return asked


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_all_of_its_specs(compiler, capsys, preset):
    assert main(["compile", "--preset", preset, "--jobs", "3", "--cuda", "13"]) == 0
    specs = shipped_specs(preset)
    assert compiler["specs"] == list(specs)
    assert compiler["jobs"] == 3
    captured = capsys.readouterr()
    new = len(specs) - len(specs) // 2
    assert f"{new} compiled, {len(specs) // 2} were there, 0 failed, for sm_90a and CUDA 13" in captured.out
    assert [line.split()[1] for line in captured.err.splitlines()] == [spec.name for spec in specs]


def test_without_a_preset_it_is_what_plain_calls_ask_for(compiler):
    assert main(["compile"]) == 0
    assert compiler["specs"] == list(shipped_specs("forward"))


def test_a_spec_that_fails_is_named_and_the_others_are_kept(compiler, capsys):
    compiler["fails"] = shipped_specs("features")[0].name
    assert main(["compile", "--preset", "features"]) == 1
    captured = capsys.readouterr()
    assert f"fa3 compile: {compiler['fails']}: too many registers" in captured.err
    assert "1 failed" in captured.out


def test_an_unknown_preset_is_refused_with_those_there_are(compiler, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["compile", "--preset", "everything"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert all(preset in error for preset in PRESETS)
    assert not compiler["specs"]


def test_no_job_at_all_is_refused(compiler, capsys):
    assert main(["compile", "--jobs", "0"]) == 2
    assert "--jobs 0: must be at least 1" in capsys.readouterr().err
    assert not compiler["specs"]


def test_a_store_that_takes_nothing_is_named_before_anything_is_compiled(compiler, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["compile", "--store", str(tmp_path / "file")]) == 1
    assert "no folder of the store takes new artifacts" in capsys.readouterr().err
    assert not compiler["specs"]
