"""Model file of a run, which the training script may import and change.

`pipeline_script` runs the file again, so earlier changes of the imported module are lost. If a literal or a function
was changed, an error reports it. Changes in the block of `pipeline_script` take effect, or raise an error.
"""

import ast
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from planner.core.errors import UsageError
from planner.model.load import LoadedModel


class ModelFile:
    """Model file of a run. The training script may import the file as a module."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._functions = self._functions_now()

    def load(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Call `load`, which runs the model file, and return its result.

        If the script imports the file later, the import returns the module in which `load` has run the file.

        Raises:
            UsageError: The script has imported the file, and changed a function or literal, which `load` would reset.
        """
        name = self._path.stem
        if self._module is sys.modules.get(name):
            lost = next(_changed_names(self._path, self._module), None) if self._module is not None else None
            if lost is not None:
                raise UsageError(
                    f"the script has changed `{lost}` of {self._path.name} before `with pipeline_script(…)`, which "
                    "runs the file again, so the change is lost",
                    hint="change it in the block of `with pipeline_script(…)`, or in the file",
                )
            spec = importlib.util.find_spec(name) if name not in sys.modules and name.isidentifier() else None
            if spec is not None and spec.origin == str(self._path):
                sys.modules[name] = importlib.util.module_from_spec(spec)  # `load` runs the file in this module
        return load()

    def check_functions(self) -> None:
        """Raise a `UsageError` if the script has replaced a function of the file since this object was made."""
        for name, function in self._functions_now().items():
            if function is not self._functions[name]:
                raise UsageError(
                    f"the script has replaced `{name}` of {self._path.name}, but the pipeline still calls the file's",
                    hint="let the function in the file use a variable of its module, and set this variable instead",
                )

    @property
    def _module(self) -> ModuleType | None:
        modules = (sys.modules.get(name) for name in (self._path.stem, f"gpipe_plan_model_{self._path.stem}"))
        return next((module for module in modules if getattr(module, "__file__", None) == str(self._path)), None)

    def _functions_now(self) -> dict[str, Any]:
        return {name: getattr(self._module, name, None) for name in ("loss_fn", "loss_count", "train_batches")}


def _changed_names(path: Path, module: ModuleType) -> Iterator[str]:
    """Yield names of constants and functions whose value in `module` is not the one that the file `path` defines.

    Only literals and undecorated functions whose name the file sets once are compared. If such a value
    differs, the script has changed it.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # `load` reports it
    nodes = list(ast.walk(tree))
    written = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    written |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    defined = Counter(name for node in nodes for name in _defined_names(node))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [("", module, tree.body), *((f"{c.name}.", getattr(module, c.name, None), c.body) for c in classes)]
    for prefix, owner, statements in bodies:
        values = getattr(owner, "__dict__", {})
        for name, is_equal in (pair for statement in statements for pair in _constants(statement, path)):
            if name in values and name not in written and defined[name] == 1 and not is_equal(values[name]):
                yield prefix + name


def _defined_names(node: ast.AST) -> list[str]:
    """Return the names that a node assigns, defines or imports."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else []


def _constants(statement: ast.stmt, path: Path) -> Iterator[tuple[str, Callable[[Any], bool]]]:
    """Yield the name of the function or literal that a statement defines, and a predicate for the name's present value.

    The predicate returns True if the value is a function of the file, or equals the literal.
    """
    if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
        yield (
            statement.name,
            lambda now: isinstance(now, FunctionType) and Path(now.__code__.co_filename).resolve() == path,
        )
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        value = statement.value.operand if isinstance(statement.value, ast.UnaryOp) else statement.value
        if len(statement.targets) == 1 and isinstance(value, ast.Constant):
            literal = ast.literal_eval(statement.value)
            yield statement.targets[0].id, lambda now: type(now) is type(literal) and now == literal
