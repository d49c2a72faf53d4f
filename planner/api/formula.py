"""`profile --from-formula`: profile of a transformer that does not exist yet, for an estimated device.

torch is not imported. The formulas are in `planner.profile.formula`.
"""

from dataclasses import fields
from typing import Any, Final

from planner.api import texts
from planner.api.option import keywords_of
from planner.api.options.profiling import FormulaOptions, ProfileOptions
from planner.core.errors import UsageError
from planner.core.values.devices import ASSUMED_RESERVE_BYTES, accelerator
from planner.core.values.limits import LARGEST
from planner.core.values.precision import Precision
from planner.core.values.profile import Device, Profile
from planner.core.values.rates import Rates, rates_of
from planner.profile.formula.costs import Pace, transformer_profile
from planner.profile.formula.layers import Execution, Widths
from planner.profile.formula.shapes import Transformer, gpt_shape

FORMULAS: Final = ("transformer",)

_ESTIMATE: Final = "estimate:"
_SHAPE_OPTIONS: Final = tuple(of.name for of in fields(FormulaOptions))
_SHARED_OPTIONS: Final = ("output", "batch_sizes", "batch", "device", "optimizer", "dtype", "progress", "note", "warn")
"""Other options that a formula accepts."""

_STATES: Final = {"adamw": 2, "adam": 2, "momentum": 1, "rmsprop": 1, "sgd": 0}
"""Numbers of optimizer state per parameter, in the parameter's precision."""

_NEEDED: Final = {
    "layers": ("layer", 10_000),
    "hidden": ("channel", 2**20),
    "heads": ("head", 2**16),
    "sequence": ("token", 2**26),
    "vocabulary": ("word", 2**26),
}
"""Required options: noun and largest allowed value."""


def profile_by_formula(options: ProfileOptions) -> Profile:
    """Return the profile of a model with the shape given by options.

    Raises:
        UsageError: An option is wrong, missing, or only valid for a measured model.
    """
    texts.choice("--from-formula", str(options.from_formula), FORMULAS)
    _refuse(
        options,
        [k.name for k in keywords_of(ProfileOptions) if k.name not in (*_SHARED_OPTIONS, *_SHAPE_OPTIONS)],
        "a model's file",
    )
    for name in _NEEDED:
        if getattr(options, name) is None:
            raise UsageError(f"`--from-formula {options.from_formula}` needs `{_spelled(name)}`", hint=_EXAMPLE)
    precision = texts.precision(options.dtype)
    half = precision not in ("", "fp32")
    pace, device = _pace(options, half=half)
    profile = transformer_profile(
        _shape(options),
        _execution(options),
        _widths(options, precision, half=half),
        pace,
        device=device,
        dtype=precision or "float32",
        optimizer=_optimizer(options),
        micro_batch_sizes=texts.micro_batch_sizes(options.batch_sizes, options.batch),
        # torch's optimizers step all parameters at once; `--state-bytes` describes another engine.
        steps_at_once=options.state_bytes is None,
    )
    if max(max(each) for layer in profile.layers for each in (layer.saved_bytes, layer.forward_flops)) > LARGEST:
        raise UsageError("a model of that shape is too large to compute with")
    return profile


def refuse_shapes(options: ProfileOptions) -> None:
    """Raise UsageError if an option for formulas is used with a measured model."""
    _refuse(options, [name for name in _SHAPE_OPTIONS if name != "from_formula"], "`--from-formula`")


_EXAMPLE: Final = "for example `--layers 32 --hidden 3072 --heads 24 --sequence 2048 --vocabulary 32000`"


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(options: ProfileOptions, names: list[str], owner: str) -> None:
    """Raise UsageError for options that are not at their default."""
    defaults = {k.name: k for k in keywords_of(ProfileOptions)}
    for name in names:
        option, value = defaults[name].option, getattr(options, name)
        if value and value != defaults[name].default:
            spelled = option.forms if option is not None and option.forms else _spelled(name)
            raise UsageError(f"`{spelled}` needs {owner}", hint="see `gpipe-plan profile --help`")


def _shape(options: ProfileOptions) -> Transformer:
    sizes = {name: texts.number_of(_spelled(name), getattr(options, name), *of) for name, of in _NEEDED.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    split = texts.number_of("--tensor-parallel", options.tensor_parallel, "device", heads)
    wide = 4 * hidden if options.feed_forward is None else options.feed_forward
    texts.number_of("--feed-forward", wide, "channel", 2**22)
    if hidden % heads or heads % split:
        raise UsageError(
            f"`--hidden {hidden} --heads {heads} --tensor-parallel {split}` do not divide evenly",
            hint="`--hidden` must be a multiple of `--heads`, and `--heads` of `--tensor-parallel`",
        )
    return gpt_shape(**sizes, feed_forward=wide, tied=options.tied)


def _execution(options: ProfileOptions) -> Execution:
    return Execution(
        tensor_parallel=options.tensor_parallel,
        sequence_parallel=options.sequence_parallel,
        keep_scores=options.keep_scores,
        fused=True,
    )


def _widths(options: ProfileOptions, precision: Precision, *, half: bool) -> Widths:
    activation = 2 if half else 4
    if options.state_bytes is not None:
        state = _state_bytes(options.state_bytes)
        return Widths(activation=activation, parameter=state[0], gradient=state[1], optimizer=state[2])
    mixed = precision.endswith("-mixed")
    width = 4 if mixed else activation
    return Widths(
        activation=activation,
        parameter=width,
        gradient=width,
        optimizer=width * _STATES[_optimizer(options)],
        cast=2 if mixed else 0,
    )


def _state_bytes(value: Any) -> tuple[int, ...]:
    numbers = texts.integers("--state-bytes", value)
    if len(numbers) != 3 or max(numbers) > 64:
        raise UsageError(
            f"`--state-bytes {value}`: expected three numbers up to 64",
            hint="bytes of a parameter, its gradient, and its optimizer state with master copies: `2,2,12`",
        )
    return numbers


def _optimizer(options: ProfileOptions) -> str:
    return texts.choice("--optimizer", options.optimizer or "adamw", tuple(_STATES))


def _pace(options: ProfileOptions, *, half: bool) -> tuple[Pace, Device]:
    """Return the compute rates, and the device as the profile names it."""
    rate = None if options.rate is None else texts.flops_per_s(options.rate)
    if not options.device.startswith(_ESTIMATE):
        if rate is None or options.device != "cpu":
            raise UsageError(
                f"a formula needs an estimated device, got `--device {options.device}`",
                hint="use `--device estimate:a100-80gb`, or give the sustained rate: `--rate 190TFLOP/s`",
            )
        return Pace(flops_per_s=rate), Device(kind="cuda", name=f"at {rate / 1e12:g} TFLOP/s", how="estimated")
    absent = accelerator(options.device.removeprefix(_ESTIMATE))
    rates: Rates = rates_of(absent.name)
    if rate is None:
        rate = rates.half_flops_per_s if half else rates.float32_flops_per_s
        options.note(
            f"times assume the data sheet's peak of {rate / 1e12:g} TFLOP/s, which no model reaches; "
            "give the sustained rate with `--rate`"
        )
    device = Device(
        kind=absent.name if absent.name.startswith("tpu") else "cuda",
        name=rates.full_name,
        memory_bytes=absent.memory_bytes,
        reserve_bytes=ASSUMED_RESERVE_BYTES,
        how="estimated",
    )
    return Pace(flops_per_s=rate, bytes_per_s=rates.bytes_per_s), device
