"""Strict reading of YAML and JSON: scalars, refusals and their lines."""

import json
from typing import Any

import pytest

from planner.core.errors import FileError
from planner.files import dump
from planner.files.strict_yaml import Document
from tests.support.chains import random_profile


def content(text: str) -> Any:
    return Document.parse("profile.yaml", text).content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2.5, -3, 1e9, 1.5e-3, 0, -0.0]", [1, 2.5, -3, 1e9, 1.5e-3, 0, -0.0]),
        ("[true, false, null, no, yes, on, ~, True]", [True, False, None, "no", "yes", "on", None, "True"]),
        ("[1e999, .inf, NaN, 5., 012, 0x10, 12:30:00]", ["1e999", ".inf", "NaN", 5.0, "012", "0x10", "12:30:00"]),
        ("{b: c, d: 'e f', g: \"h\", i: it's}", {"b": "c", "d": "e f", "g": "h", "i": "it's"}),
        ("['0', \"1.5\", 'true', '']", ["0", "1.5", "true", ""]),
        ("{b: [], c: {}, d: model.layers.0, e: é}", {"b": [], "c": {}, "d": "model.layers.0", "e": "é"}),
        ("\n- {b: 1}\n- [2, 3]\n- x", [{"b": 1}, [2, 3], "x"]),
        ("|\n  x\n  y\n", "x\ny\n"),
        ("", None),
    ],
)
def test_scalars_that_are_not_json_are_text(text: str, value: Any) -> None:
    """Texts in quotes are never numbers."""
    assert repr(content(f"a: {text}")) == repr({"a": value})


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "`a` is defined twice, first in line 1"),
        ("a:\n- {b: 1, b: 2}", 2, "`a[0].b` is defined twice, first in line 2"),
        ("a: " + "9" * 5000, 1, "9… has too many digits"),
        ("a: !!int 7", 1, "`a`: the tag tag:yaml.org,2002:int is not supported"),
        ("a:\n- !!set {b}", 2, "`a[0]`: the tag tag:yaml.org,2002:set is not supported"),
        ("a: &x 1\nb:\n- *x", 3, "`b[0]`: the alias `*x` is not supported"),
        ("&x a: 1\n*x : 2", 2, "a key is not a text"),
        ("a: 1\n---\nb: 2", 2, "is not YAML: it contains another document"),
        ("? [a]\n: 1", 1, "a key is not a text"),
        ("a: {b: 1", 2, "is not YAML"),
        ('{"a": 1, "a": 2}', 1, "`a` is defined twice"),
    ],
)
def test_yaml_mistakes_are_refused_with_their_line(text: str, line: int, message: str) -> None:
    with pytest.raises(FileError) as refused:
        content(text)
    assert message in refused.value.message
    assert refused.value.line == line


@pytest.mark.parametrize("exact", [False, True])
def test_profile_is_equal_as_yaml_and_json(*, exact: bool) -> None:
    """JSON has its own faster reader."""
    read = content(dump(random_profile(1, 5, exact=exact, sizes=(1, 2)), header="A header.\nOf two lines."))
    text = json.dumps(read)
    assert content(text) == Document("profile.json", text)._read() == read
