"""Load a user's model.py: find its functions by name, and call them with the user's settings."""

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from planner.core.errors import FileError, ModelError, UsageError
from planner.core.values.precision import Precision
from planner.core.values.profile import CountedLabels, Granularity, Setting
from planner.model.autocast import forward_context
from planner.model.calling import arguments_of
from planner.model.chain import Chain, chain_of
from planner.model.configuration import model_module_from_configuration
from planner.model.copying import copy_module
from planner.model.default_loss import DefaultLoss
from planner.model.growth import SIZES
from planner.model.inputs import (
    PLAIN,
    PLAIN_CONTAINERS,
    STACKED,
    describe_sample_list,
    input_tensor,
    samples_first_hint,
    unsplittable_type_name,
)
from planner.model.module_tensors import parameters_as_ghosts
from planner.model.nests import tensors_in
from planner.model.optimizers import OptimizerBuilder, optimizer_builder
from planner.model.process_group import hide_process_group
from planner.model.seeding import preserve_torch_generators, seeded_draws
from planner.model.settings import public_names_text, typed_settings
from planner.model.shared_memory import check_separate_memory
from planner.model.user_errors import explain_user_errors
from planner.model.variables import undo_variable_changes


class Batch(NamedTuple):
    """Inputs of the model and targets of the loss. The first dimension of each tensor counts samples."""

    inputs: Any
    targets: Any

    @property
    def num_samples(self) -> int:
        """Number of samples, read from the first input tensor."""
        tensors = [leaf for leaf in tree_flatten(self.inputs)[0] if isinstance(leaf, Tensor)]
        return int(tensors[0].shape[0])


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Functions and settings of a model.py."""

    source: str
    settings: dict[str, Setting]
    inputs: tuple[str, ...]
    build: Callable[[], nn.Module]
    """Function that returns a new model. The initial values depend on the seed of `torch.manual_seed`."""
    example_batch: Callable[[int], Batch]
    loss_fn: Callable[[Any, Any], Tensor]
    build_optimizer: OptimizerBuilder
    train_batches: Callable[[int], Iterable[Any]] | None
    optimizer_name: str
    loss_count: Callable[[Any], Any] | None = None
    """Function from targets to the number of items over which `loss_fn` averages; None if the items are samples."""
    counted_labels: CountedLabels = ""
    """Labels over which the model averages its own loss; see `planner.core.values.profile.Model.counted_labels`."""
    granularity: Granularity = "coarse"
    uncut: tuple[str, ...] = ()
    """Names of layers that no stage may end with; see `planner.core.values.profile.Model.uncut`."""
    precision: Precision = ""
    """Precision in which the model runs, after the result of `build` is converted (`planner.model.precision`)."""
    default_loss: DefaultLoss | None = None
    """Loss function for a file without `loss_fn`: it computes the loss from the output. None for other files."""
    is_without_values: bool = False
    """True if `build` returns parameters on the meta device, which have no values (`planner.model.shortened`)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about defaults, such as the chosen loss. Complete after the first call of `chain`."""
        return () if self.default_loss is None or not self.default_loss.note else (self.default_loss.note,)

    def chain(self, model: nn.Module) -> Chain:
        """Return the chain of layers of `model`, which `build` returned.

        Raises:
            ModelError: The model fails or cannot be cut, or a trained parameter shares memory with a different tensor.
        """
        # Autocast's cache is off: a cached copy of a weight that two modules share would cross the cuts between them.
        # Seeds make the chain the same in every process, also if values decide shapes and so the cuts.
        with seeded_draws(0), forward_context(self.precision, torch.device("cpu"), cached=False), hide_process_group():
            chain = chain_of(
                model,
                lambda size: self.example_batch(size).inputs,
                self.granularity,
                loss_of=self._loss_of,
                uncut=self.uncut,
            )
            if chain.outline is None and self.default_loss is not None:  # `chain_of` has not called the loss
                self._choose_loss(model)
        check_separate_memory(chain.layers)
        return chain

    def _choose_loss(self, model: nn.Module) -> None:
        """Call the loss once, so that the default loss is chosen."""
        quiet = contextlib.suppress(Exception, SystemExit)  # running the layers raises the error again
        with (
            preserve_torch_generators(),
            undo_variable_changes(model, self.loss_fn),
            parameters_as_ghosts(model),
            quiet,
        ):
            batch = self.example_batch(SIZES[0])
            args, kwargs = arguments_of(batch.inputs)
            self.loss_fn(model(*args, **kwargs), batch.targets)

    def _loss_of(self, size: int) -> Callable[[Any], object]:
        targets = self.example_batch(size).targets

        def loss(output: Any) -> object:
            tensors = tensors_in(output)
            return self.loss_fn(output, to_device(targets, tensors[0].device) if tensors else targets)

        return loss


def load_model(
    source: str,
    *,
    settings: Mapping[str, str] | None = None,
    inputs: Sequence[str] = (),
    optimizer: str | None = None,
    granularity: Granularity = "coarse",
    uncut: Sequence[str] = (),
) -> LoadedModel:
    """Return the model in `path/to/model.py[:ENTRY]`.

    Args:
        source: Path of the file, and after a colon optionally ENTRY: the name of a function that returns the model, of
            an `nn.Module` class, or of a finished model. Without ENTRY, the name is `build_model`, else `model`, else
            the only `nn.Module` subclass without required arguments. A Hugging Face config.json needs no ENTRY.
        settings: Texts of the `--set` options by name; the signature of the entry determines their types.
        inputs: Texts of the `--input` options, for a file without `example_batch`.
        optimizer: Name of an optimizer, which replaces the file's `build_optimizer`.
        granularity: `coarse` for about one layer per block, `fine` for parts of blocks; no effect on a Sequential.
        uncut: Names of layers that no stage may end with.

    Raises:
        FileError: The file does not exist, or its name ends neither in .py nor in .json.
        ModelError: The file fails when it is imported, or defines no model.
        UsageError: A setting is unknown or has another type.
    """
    path, module, entry = _import(source)
    loaded = _loaded(
        path, module, entry, settings=settings, inputs=inputs, optimizer=optimizer, granularity=granularity
    )
    return replace(loaded, uncut=tuple(uncut))


def load_module(
    model: Any,
    *,
    example_batch: Callable[[int], tuple[Any, Any]] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    inputs: Sequence[str] = (),
    optimizer: str | None = None,
    granularity: Granularity = "coarse",
) -> LoadedModel:
    """Return a `LoadedModel` for a copy of `model`.

    Args:
        model: The module.
        example_batch: Function from a number of samples to `(inputs, targets)`.
        loss_fn: Function from output and targets to the loss.
        inputs: Shapes as in the `--input` option, if there is no `example_batch`.
        optimizer: Name of an optimizer.
        granularity: `coarse` for about one layer per block, `fine` for parts of blocks; no effect on a Sequential.

    Raises:
        ModelError: `model` is not an `nn.Module`, or its inputs are unknown.
    """
    module = ModuleType("given")
    content = {"model": copy_module(model), "example_batch": example_batch, "loss_fn": loss_fn}
    vars(module).update({name: value for name, value in content.items() if value is not None})
    loaded = _loaded(
        "the model", module, "model", settings=None, inputs=inputs, optimizer=optimizer, granularity=granularity
    )
    # The empty source shows that there is no file from which a script could load the model.
    return replace(loaded, source="")


def _loaded(
    path: str,
    module: ModuleType,
    entry: str | None,
    *,
    settings: Mapping[str, str] | None,
    inputs: Sequence[str],
    optimizer: str | None,
    granularity: Granularity,
) -> LoadedModel:
    entry_name, build_model, typed = _builder(path, module, entry, dict(settings or {}))
    example = _example_batch(path, module, typed, tuple(inputs))
    for name in ("loss_fn", "loss_count", "build_optimizer", "train_batches"):
        if not callable(getattr(module, name, len)):
            raise ModelError(f"{path}: `{name}` is a {type(getattr(module, name)).__name__}, not a function")
    own_optimizer = getattr(module, "build_optimizer", None) if optimizer is None else None
    default_loss = DefaultLoss(path)
    build, name_of_it = optimizer_builder(own_optimizer, optimizer or "adamw")
    return LoadedModel(
        source=f"{path}:{entry_name}",
        settings=typed,
        inputs=tuple(inputs),
        build=build_model,
        example_batch=example,
        loss_fn=getattr(module, "loss_fn", default_loss),
        build_optimizer=_checked_optimizer(path, build),
        train_batches=getattr(module, "train_batches", None),
        optimizer_name=name_of_it,
        loss_count=getattr(module, "loss_count", None),
        granularity=granularity,
        default_loss=None if hasattr(module, "loss_fn") else default_loss,
    )


def _import(source: str) -> tuple[str, ModuleType, str | None]:
    path, colon, entry = source.partition(":")
    file = Path(path)
    if file.is_dir():
        raise FileError("is a directory, a model.py is needed", path=path)
    if not file.is_file():
        hint = "give the path of a Python file that defines your model, or of a config.json; nothing is downloaded"
        raise FileError("no such file", path=path, hint=hint)
    if file.suffix == ".json":
        return path, model_module_from_configuration(path), entry if colon else None
    if file.suffix != ".py":
        raise FileError("is not a Python file (its name must end in .py)", path=path)
    imported = sys.modules.get(file.stem)
    # A script that has imported the file may set its variables: its code is run again in the same module.
    is_same = imported is not None and str(getattr(imported, "__file__", "")) == str(file.resolve())
    name = file.stem if is_same else f"gpipe_plan_model_{file.stem}"
    loader = _FromSource(name, str(file.resolve()))
    spec = importlib.util.spec_from_file_location(name, file.resolve(), loader=loader)
    assert spec is not None
    module = imported if is_same and imported is not None else importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickling and dataclasses look up modules there
    with explain_user_errors(path, "importing it"):
        loader.exec_module(module)
    return path, module, entry if colon else None


class _FromSource(SourceFileLoader):
    """Loader that ignores the bytecode cache. The cache can miss the second of two edits within one second."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError(f"{path} is not cached")


def _builder(
    path: str, module: ModuleType, entry: str | None, settings: dict[str, str]
) -> tuple[str, Callable[[], nn.Module], dict[str, Setting]]:
    name, value = _entry(path, module, entry)
    if isinstance(value, nn.Module):
        if settings:
            raise UsageError(f"{path}: `{name}` is a finished model and takes no `--set {next(iter(settings))}=…`")
        return name, lambda: value, {}
    if not callable(value) or inspect.ismodule(value):
        raise ModelError(
            f"{path}: `{name}` is a {type(value).__name__}, not an nn.Module or a function that builds one",
            hint=f"name a function that returns the model, such as `{path}:build_model`",
        )
    typed = typed_settings(f"{path}:{name}", value, settings)

    def build() -> nn.Module:
        with explain_user_errors(path, f"`{name}()`"), hide_process_group():
            model = value(**typed)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"{path}: `{name}()` returned {type(model).__name__}, not an nn.Module",
                hint="return the model alone; make an nn.Sequential of a list of layers",
            )
        return model

    return name, build, typed


def _entry(path: str, module: ModuleType, entry: str | None) -> tuple[str, Any]:
    if entry is not None:
        if not hasattr(module, entry):
            raise ModelError(f"{path} has no `{entry}`", hint=f"it defines {public_names_text(vars(module))}")
        return entry, getattr(module, entry)
    for name in ("build_model", "model"):
        if hasattr(module, name):
            return name, getattr(module, name)
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    ready = [value for value in classes if not _required(value)]
    if len(ready) == 1:
        return ready[0].__name__, ready[0]
    names = public_names_text(value.__name__ for value in ready)
    models = f"{len(ready)} modules that could be the model ({names})" if ready else "no model"
    raise ModelError(
        f"{path} has {models}",
        hint="define `build_model()` that returns an nn.Module, or name the entry: `model.py:NAME`",
    )


def _required(callable_: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(callable_).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _example_batch(
    path: str, module: ModuleType, settings: Mapping[str, Setting], inputs: tuple[str, ...]
) -> Callable[[int], Batch]:
    function = getattr(module, "example_batch", None)
    if function is None and not inputs:
        raise ModelError(
            f"{path} has no `example_batch(batch_size)`, so the model's inputs are unknown",
            hint="define it to return `(inputs, targets)`, or give shapes: `--input 3x224x224` or `1024:int64:32000`",
        )
    if function is None or inputs:
        # The texts are parsed here once, so that a wrong shape is reported before the model is built.
        for text in inputs:
            input_tensor(text, 1)
        if len(inputs) == 1:
            return lambda size: Batch(input_tensor(inputs[0], size), None)
        return lambda size: Batch(tuple(input_tensor(text, size) for text in inputs), None)
    if not callable(function):
        raise ModelError(f"{path}: `example_batch` is a {type(function).__name__}, not a function of the batch size")
    accepted = inspect.signature(function).parameters
    arguments = {name: value for name, value in settings.items() if name in accepted}

    def example(size: int) -> Batch:
        with explain_user_errors(path, f"`example_batch({size})`"):
            pair = function(size, **arguments)
        # A list of two items is accepted, because `next(iter(loader))` returns one.
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            kind = f"a {type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
            raise ModelError(
                f"{path}: `example_batch({size})` returned {kind}, expected `(inputs, targets)`",
                hint="return `inputs, None` if `forward` takes the targets as well; `inputs` may be a tensor, a "
                "tuple, or a dict of keyword arguments",
            )
        _check_samples(path, size, pair, lambda other: function(other, **arguments))
        return Batch(*pair)

    return example


def _check_samples(path: str, size: int, pair: Sequence[Any], example: Callable[[int], Any]) -> None:
    """Check that `pair`, the inputs and targets of `example(size)` in file `path`, can be cut into micro-batches."""
    wrong = [list(t.shape) for t in tree_flatten(pair)[0] if isinstance(t, Tensor) and t.shape[:1] != (size,)]
    values = describe_sample_list(pair, size, (Tensor, dict) if wrong else PLAIN)
    others = ""
    if values:  # their number may equal the number of samples by chance
        with preserve_torch_generators(), contextlib.suppress(Exception):
            others = describe_sample_list(example(size + 1), size + 1, (Tensor, dict) if wrong else PLAIN)
    if wrong and not others:
        raise ModelError(
            f"{path}: `example_batch({size})` returned a tensor of shape {wrong[0]}, "
            f"expected {size} samples in its first dimension",
            hint=samples_first_hint(wrong[0], size),
        )
    kind = unsplittable_type_name(pair, size)
    if kind:
        raise ModelError(
            f"{path}: `example_batch({size})` returned a {kind}, which cannot be cut into micro-batches",
            hint=PLAIN_CONTAINERS,
        )
    if others:
        raise ModelError(
            f"{path}: `example_batch` returned {values}, one per sample; only tensors are cut into micro-batches",
            hint=STACKED
            if wrong
            else "return a tensor (`torch.tensor(labels)`), map texts to numbers in the data "
            "loader, and leave out values that neither the model nor the loss reads",
        )


_PARAMETERS = (
    "it gets `model.parameters()`, one by one and without names: choose by shape, by position, or by an attribute that "
    "the model sets (`p.no_decay = True`); `--debug` shows the whole traceback"
)


def _checked_optimizer(path: str, build: OptimizerBuilder) -> OptimizerBuilder:
    def checked(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        with explain_user_errors(path, "`build_optimizer(parameters)`", hint=_PARAMETERS):
            optimizer: Any = build(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ModelError(
                f"{path}: `build_optimizer` returned {type(optimizer).__name__}, not an optimizer",
                hint="return a `torch.optim.Optimizer`; derive a class of your own from it",
            )
        return optimizer

    return checked


def to_device(value: Any, device: torch.device) -> Any:
    """Return the nested `value` with all tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
