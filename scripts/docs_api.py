"""Extension of griffe (mkdocs.yml): read the functions of `planner.api` with the keywords that decorators give them."""

import re
from importlib import import_module
from inspect import Parameter, formatannotation, getdoc, signature

import griffe


class Keywords(griffe.Extension):
    """Signatures and docstrings of the functions of `planner.api`, as they are at run time."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Replace parameters and docstring of a decorated function by those of the imported one."""
        if not any("planner.api.keywords" in decorator.callable_path for decorator in func.decorators):
            return
        imported = getattr(import_module(func.module.path), func.name)
        func.parameters = griffe.Parameters(*map(_parameter, signature(imported).parameters.values()))
        func.docstring = griffe.Docstring(getdoc(imported) or "", parent=func, parser="google")


def _parameter(parameter: Parameter) -> griffe.Parameter:
    annotation = re.sub(r"\b(?:\w+\.)+(?=\w)", "", formatannotation(parameter.annotation))
    default = parameter.default
    text = None if default is Parameter.empty else "..." if callable(default) else repr(default)
    kind = griffe.ParameterKind[parameter.kind.name.lower()]
    return griffe.Parameter(parameter.name, annotation=annotation, kind=kind, default=text)
