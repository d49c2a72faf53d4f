"""A net for the language of documents, messages and docstrings: words to avoid, long sentences, missing sections.

Ruff checks that docstrings of functions begin with an imperative verb (D401).
"""

import ast
import re
from collections.abc import Iterator
from statistics import median, quantiles

import pytest

from tests.support.house import ROOT, modules

PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]

INSTEAD_OF = re.compile(
    r"\b(?:(?:held|holds|hold) against|c[ao]mes? out|came (?:out|true)|lets? go|go(?:es)? on|mend(?:s|ed)?|anew"
    r"|likewise|in one piece|the road|in front of|lies? (?:behind|beside)|(?:stage|layer|rank)s? (?:behind|beside)"
    r"|halves of backwards?|backwards? in halves|nobody|somebody|whoever|one's own|nothing beats|takes longest"
    r"|runs? beside|(?:is|are|was|were) (?:asked|told|had)|programmes?|memory caps?|at the moment)\b",
    re.IGNORECASE,
)
"""Words for which docs/glossary.md has a term, or which do not say who does what."""


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page, without code, tables, headings and link targets."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?: {4}|\||#|<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n[-*] |\n\d+\. ", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documents_use_the_terms_of_the_glossary(page) -> None:
    assert INSTEAD_OF.findall(" ".join(sentences(page.read_text(encoding="utf-8")))) == []


@pytest.mark.slow
def test_messages_and_docstrings_use_the_terms_of_the_glossary() -> None:
    constants = ((m.path, n.value) for m in modules() for n in ast.walk(m.tree) if isinstance(n, ast.Constant))
    texts = ((path, value) for path, value in constants if isinstance(value, str))
    assert [(path, words) for path, text in texts if (words := INSTEAD_OF.findall(text))] == []


def test_sentences_of_documents_are_short() -> None:
    lengths = [
        len(s.split()) for page in PAGES for s in sentences(page.read_text(encoding="utf-8")) if s.count(" ") > 2
    ]
    assert median(lengths) <= 15
    assert quantiles(lengths, n=10)[-1] <= 25
    assert max(lengths) <= 50


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield public functions and methods with three or more arguments; `cli` is left out: options have help texts."""
    for module in modules():
        scopes = [module.tree, *(n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]
        for node in (n for scope in scopes for n in scope.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"):
            arguments = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            if len(arguments - {"self", "cls"}) >= 3 and module.room != "cli":
                yield f"{module.path}:{node.name}", node


def test_public_functions_describe_arguments_and_results() -> None:
    """Methods that implement a protocol of their package are described there: hence 90 %."""
    described = [(name, ast.get_docstring(node) or "", node.returns) for name, node in public_functions()]
    without_args = [name for name, text, _ in described if "Args:" not in text]
    returning = [(name, text) for name, text, result in described if result is None or ast.unparse(result) != "None"]
    without_returns = [name for name, text in returning if not re.search(r"(?m)^(Return|Yield)s?[: ]", text)]
    assert len(without_args) <= 0.1 * len(described), without_args
    assert len(without_returns) <= 0.1 * len(returning), without_returns
