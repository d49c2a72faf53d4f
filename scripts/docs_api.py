"""How the API's page of the site reads the functions of `planner.api`: an extension of griffe (mkdocs.yml)."""

import re
from importlib import import_module
from inspect import Parameter, formatannotation, getdoc, signature

import griffe


class Verbs(griffe.Extension):
    """Takes the functions of `planner.api` as they are called: decorators make their keywords, and text about them."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Puts the keywords and the docstring of the function in memory in the place of the written ones."""
        if not any("planner.api.keywords" in decorator.callable_path for decorator in func.decorators):
            return
        called = getattr(import_module(func.module.path), func.name)
        func.parameters = griffe.Parameters(*map(_parameter, signature(called).parameters.values()))
        func.docstring = griffe.Docstring(getdoc(called) or "", parent=func, parser="google")


def _parameter(of: Parameter) -> griffe.Parameter:
    annotation = re.sub(r"\b(?:\w+\.)+(?=\w)", "", formatannotation(of.annotation))
    default = None if of.default is Parameter.empty else "..." if callable(of.default) else repr(of.default)
    kind = griffe.ParameterKind[of.kind.name.lower()]
    return griffe.Parameter(of.name, annotation=annotation, kind=kind, default=default)
