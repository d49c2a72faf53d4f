"""Profiles in our own layout are read without the YAML reader, and mean what they mean to it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import FileError
from planner.files import dump
from planner.files.quick_yaml import NotQuickError, quick_content
from planner.files.strict_yaml import Document
from tests.support.chains import random_profile


def both(text: str) -> tuple[Any, Any]:
    """The content as `Document` has it, and as the YAML reader alone has it."""
    document = Document.parse("profile.yaml", text)
    return document.content, document._read()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_profile_that_we_wrote_means_the_same_either_way(seed: int, *, exact: bool) -> None:
    """And it takes the quick way."""
    text = dump(random_profile(seed, 5, exact=exact, sizes=(1, 2)), header="A header.\nOf two lines.")

    def slow(piece: str) -> Any:
        return Document("profile.yaml", piece)._read()

    quick, read = both(text)
    assert quick == read == quick_content(text, slow)


LINES = [
    "a: [1, 2.5, -3, 1e9, 1.5e-3, 0, -0.0]",
    "a: [true, false, null, no, yes, on, ~, True]",
    "a: [1e999, .inf, NaN, Infinity, 5., 012, 0x10, 12:30:00]",
    "a: {b: c, d: 'e f', g: \"h\", i: it's}",
    "a: {b: 'x, y: z', c: 'it''s', d: '0'}",
    "a: {b:c, d: e:f, g: h/i.j-k}",
    "a: {b: [], c: {}, d: ''}",
    "a: {b: model.layers.0, c: 0.conv, d: -x, e: a b}",
    "a: 'x # y' # z",
    "a: x # y",
    "a: {b: c} # d",
    "a: [1 , 2 ,3]",
    "a: [1,2]",
    "a: {b: é, c: ü.x}",
    "a: &x 5\nb: *x",
    "a: !!str 5",
    "a: [a: 1]",
    "a: {? b : c}",
    "a:\n- {b: 1}\n- [2, 3]\n- x",
    "a:\n- {b: 1}\nc: 5",
    "a:\n  b: 1",
    "a: x\n  y",
    "a: |\n  x",
    "a:",
    "a: null",
    "a: b: c",
    "a: {b: 1, b: 2}",
    "a: 1\na: 2",
    "a: {b: 1",
    "a: }",
    "- 1",
    "a: [x\u2028y]",
    "a: [1,\t2]",
    "a: '\\u0041'",
    "a: {b: yes}\r\nc: no\r\n",
    "---\na: 1",
    "a: [@x, `y, %z, x%]",
    "a: {b: 2001-01-01, c: 1_000, d: +1}",
    "a: &x\n- {b: 1}\nc: *x",
    "a: &x\n- {b: 1}\nc: {d: *x}",
    "a: 'x\n- {b: 1}\n'",
    "a: ['x\n- {b: 1}\n', y]",
    'a: "x\n- {b: 1}\ny"',
    "|\n- {b: 1}",
    "a: |\n- {b: 1}",
    "a:\n- {b: 1}\n  x",
    "a:\n- {b: 1}\n- '<line 0>'",
    "a: {b: 1}\nc: <line 0>",
    "a:\n- {b: 1}\n# x\n- {b: 2}\n\n- [3]",
    "a: {b: 1}\n- {c: 2}",
    "a:\n- {b: 1}\n- {b: 1, b: 2}\n- {b: 3}",
    "- {a: 1}\n- {a: 2}",
    "a:\n  b: {c: 1}\n  d:\n  - {e: 1}",
    "a: {b: 1}\n...\n---\nc: 1",
    "? a\n: {b: 1}",
    "?\n- {b: 1}\n: c",
]


@pytest.mark.parametrize("text", LINES)
def test_whatever_the_text_it_means_what_yaml_says_or_is_refused_as_there(text: str) -> None:
    """Values that JSON and YAML read differently, other layouts, and mistakes."""
    quick, read = outcomes_of(text)
    assert quick == read


def outcomes_of(text: str) -> tuple[str, str]:
    """What `Document` makes of a text, and what the YAML reader alone does."""
    document = Document("profile.yaml", text)
    return outcome(lambda: Document.parse("profile.yaml", text).content), outcome(document._read)


def outcome(read: Callable[[], Any]) -> str:
    """What was read, or why it was not."""
    try:
        return repr(read())
    except FileError as error:
        return str(error)


def test_random_scraps_mean_the_same_either_way(tmp_path: Path) -> None:
    """Text thrown together from what may stand in such a line."""
    rng = random.Random(5)
    parts = [
        *"{}[],:-#&*!'\"?. \\",
        ": ",
        ", ",
        "a",
        "b1",
        "0",
        "1.5",
        "1e3",
        "true",
        "null",
        "no",
        "x.y",
        "é",
        "'a b'",
    ]
    agreed = 0
    for _ in range(4000):
        opening, closing = rng.choice([("{a: ", "}"), ("[", "]"), ("", "")])
        text = "k: " + opening + "".join(rng.choice(parts) for _ in range(rng.randint(1, 7))) + closing
        try:
            wanted: Any = Document("p.yaml", text)._read()
        except FileError:
            with pytest.raises((FileError, NotQuickError)):
                assert Document.parse("p.yaml", text).content is None
            continue
        assert repr(Document.parse("p.yaml", text).content) == repr(wanted), text
        agreed += 1
    assert agreed > 500


def test_random_lines_mean_the_same_either_way() -> None:
    """Documents thrown together from lines that begin or end something, and lines that are read as JSON."""
    rng = random.Random(6)
    quick = ["- {a: 1}", "- [x, 'y, z']", "b: {c: 1}", "d: [2]", "- {a: ', '}"]
    other = [
        "e:",
        "f: &x",
        "g: *x",
        "h: '",
        "'",
        'i: "',
        '"',
        "j: |",
        "  k",
        "# l",
        "",
        "- m",
        "n: [",
        "]",
        "- ",
        "? o",
        "---",
    ]
    agreed = 0
    for _ in range(3000):
        text = "a: 1\n" + "\n".join(
            rng.choice(quick if rng.random() < 0.5 else other) for _ in range(rng.randint(2, 6))
        )
        outcomes = outcomes_of(text)
        agreed += outcomes[1][0] == "{"
        assert outcomes[0] == outcomes[1], text
    assert agreed > 100
