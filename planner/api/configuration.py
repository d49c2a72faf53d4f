"""Hugging Face configurations as the model argument of `profile`: a config.json, its folder, or a preset."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from planner.api import texts
from planner.api.options.profiling import ProfileOptions
from planner.api.reading import path_of
from planner.core.errors import FileError, UsageError
from planner.core.extras import check_configuration_packages
from planner.profile.formula.presets import model_presets

_FILE: Final = "config.json"
_USUAL_SEQUENCE: Final = 4096
_PARTS: Final = ("text_config", "llm_config", "language_config")
"""Keys under which configurations of multi-modal models store the configuration of their language model."""

_LONGEST: Final = ("max_position_embeddings", "n_positions")
"""Keys of a configuration that give the largest allowed number of tokens of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Hugging Face configuration of a model."""

    kind: Literal["configuration", "preset"]
    name: str
    """Path of the configuration's file, or name of the preset."""
    content: Mapping[str, Any]
    """Settings of the model, or of the language model if the model is multi-modal."""
    part: str = ""
    """Key of the language model's settings in the file of a multi-modal model, such as `text_config`; or empty."""

    @property
    def usual_sequence(self) -> int:
        """Default number of tokens per sample (`--sequence`)."""
        longest = (self.content.get(key) for key in _LONGEST)
        return min([_USUAL_SEQUENCE, *(tokens for tokens in longest if isinstance(tokens, int) and tokens > 0)])


def configuration_of(model: Any, options: ProfileOptions) -> Configuration | None:
    """Return the configuration of `--preset` or of the file `model`; None if the model is a Python file or a module.

    Raises:
        UsageError: The preset is unknown, or is given together with a model.
        FileError: The file is missing, or is no configuration.
    """
    path = path_of(model)
    if options.preset is not None:
        if model is not None:
            raise UsageError(f"`--preset {options.preset}` takes no model, got `{path or type(model).__name__}`")
        known = model_presets()
        texts.parse_choice("--preset", options.preset, tuple(known))
        return Configuration(kind="preset", name=options.preset, content=known[options.preset])
    if path is None or not (path.endswith(".json") or Path(path).is_dir()):
        return None
    file = Path(path) / _FILE if Path(path).is_dir() else Path(path)
    content = _content(file)
    part = next((key for key in _PARTS if isinstance(content.get(key), dict)), "")
    if not part:
        return Configuration(kind="configuration", name=str(file), content=content)
    # The outer key decides whether the head is tied, as in transformers.
    shared = {key: content[key] for key in ("tie_word_embeddings",) if key in content}
    return Configuration(kind="configuration", name=str(file), content={**content[part], **shared}, part=part)


def is_for_formula(configuration: Configuration, options: ProfileOptions) -> bool:
    """Return True if a formula computes the profile. Otherwise, the model is built and measured.

    Raises:
        UsageError: `--from-formula never` is given with a preset.
        MissingPackageError: No formula computes the profile, and a package that builds the model is not installed.
    """
    if options.from_formula != "never":
        estimated = options.device.startswith("estimate:") or options.rate is not None
        if options.from_formula is not None or estimated or configuration.kind == "preset":
            return True
        check_configuration_packages(alternative="or use `--device estimate:h100`, which does not build the model")
        return False
    if configuration.kind == "preset":
        raise UsageError("`--from-formula never` needs a file", hint=f"name the {_FILE} of {configuration.name}")
    check_configuration_packages()
    return False


def note_language_model_only(configuration: Configuration, options: ProfileOptions) -> None:
    """Call `options.note` if the profile leaves out parts of the model, such as an image encoder."""
    if configuration.part:
        options.note(f"only the language model (`{configuration.part}`) is planned, without vision or audio parts")


def _content(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        if file.name == _FILE and file.parent.is_dir():
            raise FileError(f"has no {_FILE}", path=str(file.parent), hint="name a model.py or a config.json")
        raise FileError("no such file", path=str(file), hint="download the model's config.json, or use `--preset`")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"is not JSON: {error}", path=str(file)) from None
    if not isinstance(content, dict):
        raise FileError("is not a configuration: it holds no JSON object", path=str(file))
    return content
