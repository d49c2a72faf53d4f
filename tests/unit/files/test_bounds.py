"""Limits on time and memory for small files that expand, with one message each."""

import io
import json
import sys
import tracemalloc

import pytest

from planner.core.errors import FileError
from planner.files import read
from planner.files.strict_yaml import Document
from tests.support.cli import call
from tests.support.clocks import limited_cpu_time

HEAD = "schema: gpipe-plan/profile/v1\n"


@pytest.mark.timed
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.yaml", HEAD + "x: " + "[" * 100_000, "is nested more than 32 levels deep"),
        ("p.yaml", HEAD + "x:\n" + "- " * 100_000 + "x", "is nested more than 32 levels deep"),
        ("p.yaml", HEAD + "x: " + "{a: " * 990 + "1" + "}" * 990, "is nested more than 32 levels deep"),
        ("p.yaml", HEAD + "x: " + "[" * 990 + "]" * 990, "is nested more than 32 levels deep"),
        ("p.yaml", HEAD + "x: " + "[']', " * 500 + "1" + "]" * 500, "is nested more than 32 levels deep"),
        ("p.yaml", HEAD + "x: " + "[" * 500 + "]" * 500, "is nested more than 32 levels deep"),
        ("p.json", '{"x":' * 100_000, "is nested more than 32 levels deep"),
        ("p.json", '{"schema": "gpipe-plan/plan/v1", "x":' + "[" * 500 + "]" * 500 + "}", "recursion limit exceeded"),
        ("p.yaml", HEAD + "x: &me [1, *me]\n", "`x[1]`: the alias `*me` is not supported"),
    ],
)
def test_small_files_that_expand_are_refused(name, text, message, tmp_path, capsys):
    """Refusal is immediate, in little memory, with the line."""
    path = tmp_path / name
    path.write_text(text)
    tracemalloc.start()
    with limited_cpu_time(30):
        ran = call(capsys, "show", str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ran.code == 2
    assert message in ran.error
    assert "bug" not in ran.err
    assert peak < 100_000_000


def test_files_of_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.files.strict_yaml.MAX_VALUES", 10)
    with pytest.raises(FileError, match="has more than 10 values"):
        Document.parse("p.yaml", "a: [1, 2, 3, 4, 5, 6, 7, 8, 9]\n")


def test_endless_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.files.reading.MAX_BYTES", 1000)
    with pytest.raises(FileError, match="/dev/zero: has more than 1000 characters"):
        read("/dev/zero")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 1001))
    with pytest.raises(FileError, match="has more than 1000 characters"):
        read("-")


def test_json_has_the_same_content_as_yaml() -> None:
    """Invalid JSON is read as YAML, which gives the error."""
    text = json.dumps({"a": [1, 2.5, True, None, "1e9", "\x7f😀\u2028é"], "b": {"c": "no"}})
    document = Document.parse("-", text)
    assert document.content == json.loads(text) == document._read()
    assert document.lines["b", "c"] == 1
    assert Document.parse("-", '{"a": [1e999, NaN, -Infinity]}').content == {"a": ["1e999", "NaN", "-Infinity"]}
    with pytest.raises(FileError, match="`a` is defined twice"):
        Document.parse("-", '{"a": 1, "a": 2}')
