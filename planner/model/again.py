"""A model's file loaded again, as a profile or a balance configuration says that it was loaded first."""

from planner.core.values.precision import Precision
from planner.core.values.profile import Model
from planner.model.load import LoadedModel, load_model
from planner.model.precision import in_precision


def load_again(source: str, model: Model, precision: Precision, *, optimizer: str | None = None) -> LoadedModel:
    """The model in `source`, with the settings, inputs and cuts of `model`, to run in `precision`.

    Args:
        source: `path/to/model.py:ENTRY`, from the working directory.
        model: How it was loaded when it was profiled.
        precision: What it is to run in.
        optimizer: Its name; None or `build_optimizer`: the file's own.

    Raises:
        FileError: The file is not there.
        ModelError: It cannot be loaded.
    """
    loaded = load_model(
        source,
        settings={name: str(value) for name, value in model.settings.items()},
        inputs=model.inputs,
        optimizer=None if optimizer in ("", "build_optimizer") else optimizer,
        granularity=model.granularity,
        uncut=model.uncut,
    )
    return in_precision(loaded, precision)
