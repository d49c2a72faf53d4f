"""Readers of cuts in other engines' files.

Python files are parsed, not executed. Only assignments of literals are read.
"""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, Final

from planner.core.errors import FileError, UsageError
from planner.core.values.balance import Balance
from planner.core.values.plan import Plan
from planner.core.values.profile import LayerProfile
from planner.emit.automodel import ON_EVERY_STAGE
from planner.emit.layout import module_paths_of, paths_above
from planner.emit.megatron import balance_of_layout
from planner.files import read, read_plain, read_text

SUFFIXES: Final = (".py", ".json", ".toml", ".yaml", ".yml", ".sh", ".txt")
"""Suffixes of files that may have cuts."""

_LAYOUT = re.compile(r"""--pipeline-model-parallel-layout[\s=]+["']*([EtmL|(][^\s"']*)""")


def read_balance_list(path: str, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    """Return the number of layers of each stage, read from a file. `layers` are the layers of the profile, in order.

    The file is a plan or balance.yaml, or has torchgpipe's balance, a `split_spec`, torchtitan's or Automodel's
    `module_fqns_per_model_part`, DeepSpeed's parts, Megatron's layout string or a device map.

    Raises:
        FileError: The file cannot be read or has no cuts, or its cuts do not match the layers.
    """
    try:
        if path.endswith((".yaml", ".yml")):
            content = read_plain(path)
            if not (isinstance(content, dict) and "distributed" in content):
                return _balance_in(path, layers)
            text, values = "", _lower_case_names(content)
        else:
            text = read_text(path, "gpipe-plan emit")
            values = _values_by_name(path, text)
        for name, value in values.items():
            if name in _READERS:
                return _READERS[name](value, layers)
        layout = _LAYOUT.search(text)
        if layout:
            return balance_of_layout(layout[1], layers)
    except UsageError as error:
        raise FileError(error.message, path=path, hint=error.hint) from None
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise FileError(f"cannot be parsed: {error}", path=path) from None
    raise FileError(
        "has no cuts", path=path, hint=f"expected one of {', '.join(_READERS)}, or `--pipeline-model-parallel-layout`"
    )


def _balance_in(path: str, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    value = read(path)
    if isinstance(value, Balance):
        return _from_parts([stage.layers for stage in value.stages], layers)
    if isinstance(value, Plan):
        return value.balance
    raise UsageError("is neither a plan nor a balance configuration")


def _values_by_name(path: str, text: str) -> dict[str, Any]:
    content: Any = {}
    if path.endswith(".py"):
        content = _assigned(ast.parse(text))
    elif path.endswith(".toml"):
        content = tomllib.loads(text)
    elif path.endswith(".json"):
        content = json.loads(text)
    if isinstance(content, list):
        return {"module_fqns_per_model_part" if content and isinstance(content[0], list) else "balance": content}
    if not isinstance(content, dict):
        raise ValueError(f"expected a list or a mapping, got `{text.strip()}`")  # noqa: TRY004 - of a file
    named = _lower_case_names(content)
    if path.endswith(".json") and not named.keys() & _READERS.keys():
        return {"device_map": content}  # `model.hf_device_map` is saved like this
    return named


def _lower_case_names(content: Mapping[str, Any]) -> dict[str, Any]:
    named = {str(key).lower(): value for key, value in content.items()}
    distributed = named.get("distributed")
    for part in (named.get("parallelism"), distributed.get("pipeline") if isinstance(distributed, dict) else None):
        if isinstance(part, dict):
            named |= part
    return named


def _assigned(module: ast.Module) -> dict[str, Any]:
    values = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(_SplitPointReplacer().visit(node.value))
            except ValueError:
                continue  # computed values are ignored
    return values


class _SplitPointReplacer(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.Constant:
        return ast.copy_location(ast.Constant(node.attr), node)


def _from_balance(value: Any, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    balance = tuple(value)
    if not balance or not all(isinstance(count, int) for count in balance):
        raise UsageError(f"expected a list of whole numbers, got `{value}`")
    if sum(balance) != len(layers):
        raise UsageError(f"the stages have {sum(balance)} layers together, the profile has {len(layers)}")
    return balance


def _from_boundaries(value: Any, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    # DeepSpeed's parts: [0, first layer of stage 1, …, number of layers].
    return _from_balance([end - first for first, end in pairwise(value)], layers)


def _from_split_spec(value: Any, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    begins = {module_paths_of(layer)[0]: n for n, layer in enumerate(layers)}
    ends = {module_paths_of(layer)[-1]: n + 1 for n, layer in enumerate(layers)}
    cuts = set()
    for path, point in _mapping(value).items():
        boundaries = ends if point == "END" else begins
        if path not in boundaries:
            raise _not_a_layer(path, layers)
        cuts.add(boundaries[path])
    return _from_boundaries([0, *sorted(cuts - {0, len(layers)}), len(layers)], layers)


def _from_parts(value: Any, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    if not all(isinstance(paths, (list, tuple)) for paths in value):
        raise UsageError(f"expected a list of modules per stage, got `{value}`")
    stage_of: dict[str, int] = {}
    for stage, paths in enumerate(value):
        for path in paths:
            if str(path).rpartition(".")[2] == ON_EVERY_STAGE:
                continue  # is in all stages
            if stage_of.setdefault(path, stage) != stage:
                raise UsageError(f'"{path}" is in two stages')
    stages = _places_of_layers(stage_of, layers)
    if stages != sorted(stages):
        raise UsageError("the stages are not in the order of the model's layers")
    return _run_lengths(stages)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"expected a mapping of modules, got `{value}`")
    return value


def _run_lengths(labels: Sequence[Any]) -> tuple[int, ...]:
    return tuple(len(list(run)) for _, run in groupby(labels))


def _places_of_layers(place_of: Mapping[str, Any], layers: Sequence[LayerProfile]) -> list[Any]:
    inside: dict[str, list[str]] = {}
    for path in place_of:
        if not isinstance(path, str):  # a Python file may have any key
            raise UsageError(f"expected names of modules, got `{path}`")
        for above in paths_above(path):
            inside.setdefault(above, []).append(path)
    places: list[Any] = []
    named_paths: set[str] = set()
    for layer in layers:
        stages: set[Any] = set()
        for module in module_paths_of(layer):
            around = [path for path in (module, *paths_above(module), "") if path in place_of]
            named = inside.get(module) or around[:1]
            # The file may name a block whose parts are layers of the profile, or parts of a block that is one layer.
            stages.update(place_of[path] for path in named)
            named_paths.update(around, named)
        if len(stages) != 1:
            where = "is on several stages" if stages else "is in none of the stages"
            raise UsageError(f'layer "{layer.name}" {where}', hint="every layer of the profile belongs to one stage")
        places += stages
    unknown = [path for path in place_of if path not in named_paths]
    if unknown:
        raise _not_a_layer(unknown[0], layers)
    return places


def _not_a_layer(path: str, layers: Sequence[LayerProfile]) -> UsageError:
    for layer in layers:
        if any(path.startswith(f"{module}.") for module in module_paths_of(layer)) or path in layer.modules:
            return UsageError(
                f'"{path}" is inside the layer "{layer.name}" of the profile, which is not cut',
                hint="cut before or after the whole layer",
            )
    return UsageError(f'"{path}" is not a layer of the profile', hint="was it made for another model?")


_READERS: Final[dict[str, Callable[[Any, Sequence[LayerProfile]], tuple[int, ...]]]] = {
    "balance": _from_balance,
    "split_spec": _from_split_spec,
    "module_fqns_per_model_part": _from_parts,
    "pipeline_parallel_module_fqns_per_model_part": _from_parts,
    "parts": _from_boundaries,
    "device_map": lambda value, layers: _run_lengths(_places_of_layers(_mapping(value), layers)),
}
