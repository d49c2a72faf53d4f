"""Tests of plans and profiles that try to run code: no command runs it."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from tests.support import gate
from tests.support.cli import call

TAGS = [
    "!!python/object/apply:os.mkdir [mark]",
    "!!python/object/new:os.mkdir [mark]",
    "!!python/name:os.mkdir",
    "!!python/module:press",
    '!!python/object/apply:subprocess.check_output [["mkdir", "mark"]]',
    "!<tag:yaml.org,2002:python/object/apply:os.mkdir> [mark]",
]
NAMES = [
    '"""\nimport os; os.mkdir("mark")\n"""',
    "'); __import__('os').mkdir('mark'); ('",
    "$(mkdir mark)",
    "`mkdir mark`",
    "\\\nimport os\nos.mkdir('mark')#",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Write a plan, its profile, and a module that records its import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "press.py").write_text("import os\nos.mkdir('mark')\n")
    files.write("profile.yaml", gate.profile())
    assert call(capsys, "solve", "--devices", "3", "--mem", "2MB", "--batch", "4", "--schedule", "gpipe").code == 0
    return tmp_path


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("key", ["schedule: gpipe", "method: dynamic-programming", "path: profile.yaml"])
def test_python_tags_in_yaml_are_refused(folder: Path, tag: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("plan.yaml").read_text()
    assert key in text
    Path("plan.yaml").write_text(text.replace(key, f"{key.partition(':')[0]}: {tag}"))
    for command in ("check", "show", "compare", "emit"):
        ran = call(capsys, command, "plan.yaml", *(["plan.yaml"] if command == "compare" else []))
        assert ran.code == 2, ran
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("name", NAMES)
def test_emitted_scripts_quote_layer_and_model_names(folder, name, capsys):
    text = Path("profile.yaml").read_text()
    measured = files.read_profile("profile.yaml")
    assert "h.3" in text
    layers = tuple(replace(layer, name=name if layer.name == "h.3" else layer.name) for layer in measured.layers)
    files.write("profile.yaml", replace(measured, layers=layers, model=replace(measured.model, source=f"{name}.py:x")))
    assert call(capsys, "solve", "--devices", "3", "--mem", "2MB", "--batch", "4", "--schedule", "gpipe").code == 0
    for engine in ("native", "torch", "torchgpipe", "deepspeed", "torchtitan", "device-map"):
        ran = call(capsys, "emit", "-o", engine, "--format", engine)
        assert ran.code in (0, 2), ran
        assert "bug" not in ran.err
        for script in Path(engine).glob("*.py"):
            code = compile(script.read_text(), str(script), "exec")
            assert "mkdir" not in code.co_names
    assert not (folder / "mark").exists()
