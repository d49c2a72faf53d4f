"""Decorators that turn the options of a command into keyword arguments of its function.

The keywords are the fields of `record`, a dataclass in `planner.api.options`. Type checkers and `help` see them.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Any, ParamSpec, Protocol, TypeVar

from planner.api.option import OptionField, option_fields_of
from planner.api.reading import AnyProfile
from planner.api.texts import File
from planner.core.values.plan import Plan

P = ParamSpec("P")
Record = TypeVar("Record")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class _ProfileCommand(Protocol[P, Result_co]):
    def __call__(self, profile: AnyProfile = ..., *args: P.args, **keywords: P.kwargs) -> Result_co: ...


class _PlanCommand(Protocol[P, Result_co]):
    def __call__(self, plan: File | Plan = ..., *args: P.args, **keywords: P.kwargs) -> Result_co: ...


class _ModelCommand(Protocol[P, Result_co]):
    def __call__(self, model: File | Any | None = ..., *args: P.args, **keywords: P.kwargs) -> Result_co: ...


def profile_command(
    record: Callable[P, Record],
) -> Callable[[Callable[[AnyProfile, Record], Result]], _ProfileCommand[P, Result]]:
    """Return a decorator that replaces `options` of `command(profile, options)` by one keyword per field of `record`.

    The default of `profile` is "profile.yaml".
    """
    return lambda verb: _with_keywords(verb, record, default="profile.yaml")


def plan_command(
    record: Callable[P, Record],
) -> Callable[[Callable[[File | Plan, Record], Result]], _PlanCommand[P, Result]]:
    """Return a decorator that replaces `options` of `command(plan, options)` by one keyword per field of `record`.

    The default of `plan` is "plan.yaml".
    """
    return lambda verb: _with_keywords(verb, record, default="plan.yaml")


def model_command(
    record: Callable[P, Record],
) -> Callable[[Callable[[File | Any | None, Record], Result]], _ModelCommand[P, Result]]:
    """Return a decorator that replaces `options` of `command(model, options)` by one keyword per field of `record`.

    The default of `model` is None.
    """
    return lambda verb: _with_keywords(verb, record, default=None)


def _with_keywords(verb: Callable[..., Any], record: Any, *, default: object) -> Any:
    keywords = option_fields_of(record)
    taken = signature(verb)
    subject = next(iter(taken.parameters.values())).replace(default=default)
    of_record = (
        Parameter(k.name, Parameter.KEYWORD_ONLY, default=k.default, annotation=k.annotation) for k in keywords
    )
    shown = Signature([subject, *of_record], return_annotation=taken.return_annotation)

    @wraps(verb)
    def with_keywords(*arguments: Any, **values: Any) -> Any:
        _refuse_unknown(verb.__name__, values, tuple(shown.parameters))
        bound = shown.bind(*arguments, **values)
        bound.apply_defaults()
        first = bound.arguments.pop(subject.name)
        return verb(first, record(**bound.arguments))

    with_keywords.__signature__ = shown  # type: ignore[attr-defined]
    with_keywords.__doc__ = _documented(verb.__doc__ or "", keywords)
    return with_keywords


def _refuse_unknown(verb: str, values: Iterable[str], parameters: Sequence[str]) -> None:
    for name in values:
        if name not in parameters:
            near = [f"`{other}`" for other in get_close_matches(name, parameters, n=2)]
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; see `help(planner.{verb})`"
            raise TypeError(f"{verb}() got an unexpected keyword argument `{name}`{hint}")


def _documented(text: str, keywords: Sequence[OptionField]) -> str:
    before, after = cleandoc(text).split("    options: ", 1)
    forms = (f" (`{k.option.metavar}`)" if k.option is not None and k.option.metavar else "" for k in keywords)
    lines = (f"{keyword.name}: {keyword.help}{form}" for keyword, form in zip(keywords, forms, strict=True))
    wrapped = (textwrap.fill(line, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines)
    return before + "\n".join(wrapped) + after[after.index("\n") :]
