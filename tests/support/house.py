"""Counts of the house rules of CONTRIBUTING, from syntax trees of the package's source."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

__all__ = [
    "ROOT",
    "Function",
    "Module",
    "clock_readers",
    "compared_words",
    "functions",
    "is_vague",
    "modules",
    "named_files",
    "names",
    "private_torch",
]

ROOT = Path(__file__).parents[2]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_DEFINITIONS, ast.ClassDef)
_NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_CLOCKS = frozenset(
    f"{clock}{unit}" for clock in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")
)
_VAGUE = frozenset({"given", "found", "known", "told", "own", "made", "others", "alone", "mine", "theirs"})

_TOP_FOLDERS = ("planner/", "tests/", "benchmarks/", "docs/", "sample_models/", ".github/")


@dataclass(frozen=True, kw_only=True)
class Module:
    """A source file of the package."""

    path: str
    """From the root, as `planner/core/errors.py`."""
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @property
    def room(self) -> str:
        """Folder in `planner`, or the module's own name if it is in `planner` itself."""
        return self.path.split("/")[1]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function or method."""

    name: str
    """As `planner/device/clock.py:CpuClock.time_us`."""
    num_lines: int
    """Lines of code in its body: no docstring, no comment, no blank line."""
    nesting: int
    """How deep statements lie in statements; `elif` is no deeper than its `if`."""
    num_positional: int
    """Parameters that can be given by position, without `self` and `cls`."""


@cache
def modules() -> tuple[Module, ...]:
    """Return all modules of the package, by path."""
    read = []
    for path in sorted((ROOT / "planner").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        read.append(Module(path=path.relative_to(ROOT).as_posix(), text=text, tree=ast.parse(text)))
    return tuple(read)


@cache
def functions() -> tuple[Function, ...]:
    """Return all functions and methods of the package."""
    return tuple(chain.from_iterable(_functions(module) for module in modules()))


def _functions(module: Module) -> Iterator[Function]:
    code = _code_lines(module.text)
    for name, node in _definitions(module.tree):
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        first, last = (body[0].lineno, body[-1].end_lineno or 0) if body else (1, 0)
        positional = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        yield Function(
            name=f"{module.path}:{name}",
            num_lines=sum(first <= line <= last for line in code),
            nesting=_nesting(node.body),
            num_positional=sum(name not in {"self", "cls"} for name in positional),
        )


def _definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            name = f"{within}{child.name}"
            if isinstance(child, _DEFINITIONS):
                yield name, child
            yield from _definitions(child, f"{name}.")
        else:
            yield from _definitions(child, within)


def _code_lines(text: str) -> list[int]:
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [number for number, line in lines if line and not line.startswith("#")]


def _nesting(statements: Sequence[ast.stmt]) -> int:
    return max((1 + _inside(s) for s in statements if isinstance(s, _NESTING)), default=0)


def _inside(statement: ast.stmt) -> int:
    bodies = [getattr(statement, name, []) for name in ("body", "finalbody")]
    bodies += [one.body for name in ("handlers", "cases") for one in getattr(statement, name, [])]
    other = getattr(statement, "orelse", [])
    if isinstance(statement, ast.If) and len(other) == 1 and isinstance(other[0], ast.If):
        return max(_inside(other[0]), *map(_nesting, bodies))
    return max(map(_nesting, [*bodies, other]))


def clock_readers(path: str) -> Iterator[str]:
    """Yield functions of a test file that call a clock of `time` and are not marked for `make nightly`."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for name, node in _definitions(tree):
        calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
        clocks = [f.attr for f in calls if isinstance(f, ast.Attribute) and ast.unparse(f.value) == "time"]
        is_nightly = any("nightly" in ast.unparse(decorator) for decorator in node.decorator_list)
        if set(clocks) & _CLOCKS and not is_nightly:
            yield f"{path}:{name}"


def names(module: Module) -> Iterator[str]:
    """Yield every name that a function defines once: its own, its arguments, and its assignments."""
    for node in ast.walk(module.tree):
        if isinstance(node, _DEFINITIONS):
            arguments = node.args
            yield node.name
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                yield argument.arg
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from {name.id for name in stored}


def is_vague(name: str) -> bool:
    """Return True for a name that does not name a thing: `given`, `_told`."""
    return name.strip("_") in _VAGUE


def compared_words(module: Module, words: Iterable[str]) -> bool:
    """Return True if the module compares something with one of the words (`==`, `in`, `case`)."""
    wanted = frozenset(words)
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Compare, ast.match_case)):
            compared = node.pattern if isinstance(node, ast.match_case) else node
            if any(isinstance(n, ast.Constant) and n.value in wanted for n in ast.walk(compared)):
                return True
    return False


def named_files(text: str) -> set[str]:
    """Return paths and Python files that a page names outside of code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^    .*$", "", prose, flags=re.MULTILINE)
    words = re.findall(r"(?<![\w/.:-])[\w.<>*-]+(?:/[\w.<>*-]*)*", prose)
    return {w.rstrip(".") for w in words if w.startswith(_TOP_FOLDERS) or re.fullmatch(r"[\w/<>]+\.py\.?", w)}


def imported_parts(tree: ast.AST, package: str) -> set[str]:
    """Return the direct modules and packages of `package` that are imported from."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        (str(node.module) + ".").removeprefix(f"{package}.").partition(".")[0]
        for node in froms
        if str(node.module).startswith(f"{package}.")
    }


def private_torch(module: Module) -> set[str]:
    """Return private names of torch that a module uses; `torch._foreach_…` is documented."""
    imports = (node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom))
    imported = "\n".join(f"{node.module}.{alias.name}" for node in imports for alias in node.names)
    return set(re.findall(r"\btorch(?:\.[a-z]\w*)*\._(?!_|foreach_)\w+", f"{module.text}\n{imported}"))
