"""Profiles that a formula computes from options or a Hugging Face configuration, without a model.

torch is not imported. The formulas are in `planner.profile.formula`.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, Final

from planner.api import texts
from planner.api.configuration import Configuration, note_language_model_only
from planner.api.option import option_fields_of, option_name
from planner.api.options.profiling import FormulaOptions, ModelSizeOptions, ProfileOptions
from planner.core.errors import UsageError
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.devices import ASSUMED_RESERVE_BYTES, accelerator, accelerator_with_rates
from planner.core.values.limits import LARGEST
from planner.core.values.precision import Precision
from planner.core.values.profile import Device, Profile
from planner.core.values.sustained import sustained_rate
from planner.profile.formula.costs import DeviceRates, transformer_profile
from planner.profile.formula.families import FAMILIES, transformer_from_config
from planner.profile.formula.layers import ElementBytes, ExecutionSettings
from planner.profile.formula.shapes import Experts, Transformer, gpt_transformer, with_multi_token_prediction

_GPT: Final = "transformer"
"""Name of the formula for GPT models, with learned positions and biases."""

_KEYS: Final = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""Key of a Hugging Face configuration for each option that gives a size."""

_ESTIMATE: Final = "estimate:"
_SHAPE_OPTIONS: Final = tuple(of.name for of in fields(ModelSizeOptions))
_FORMULA_OPTIONS: Final = tuple(of.name for of in fields(FormulaOptions))
_SHARED_OPTIONS: Final = (
    "output",
    "batch_sizes",
    "batch",
    "sequence",
    "device",
    "optimizer",
    "dtype",
    "progress",
    "note",
    "warn",
)
"""Options that a formula accepts in addition to its own."""

_STATES: Final = {"adamw": 2, "adam": 2, "momentum": 1, "rmsprop": 1, "sgd": 0}
"""Number of optimizer states per parameter, each in the parameter's precision."""

_WIDTHS: Final = (1, 2, 4, 8)
"""Default tensor-parallel sizes for a Hugging Face configuration; sizes that do not divide its heads are left out."""

_LIMITS: Final = {
    "layers": ("layer", 10_000),
    "hidden": ("channel", 2**20),
    "heads": ("head", 2**16),
    "key_value_heads": ("head", 2**16),
    "sequence": ("token", 2**26),
    "vocabulary": ("word", 2**26),
    "feed_forward": ("channel", 2**22),
    "experts": ("expert", 2**16),
    "experts_per_token": ("expert", 2**16),
    "expert_parallel": ("group", 2**16),
}
"""Noun for messages, and largest allowed value, by option."""

_NEEDED: Final = ("layers", "hidden", "heads", "sequence", "vocabulary")
"""Options that every formula needs, unless a Hugging Face configuration is given."""


def profile_by_formula(options: ProfileOptions, configuration: Configuration | None = None) -> Profile:
    """Return the profile that a formula computes for a configuration, or for the sizes in the options.

    Raises:
        UsageError: An option is wrong, missing, or only valid for a measured model.
    """
    _refuse(
        options,
        [k.name for k in option_fields_of(ProfileOptions) if k.name not in (*_SHARED_OPTIONS, *_FORMULA_OPTIONS)],
        "a model's file",
    )
    for name, of in _LIMITS.items():
        value = getattr(options, name)
        if value is not None:
            texts.check_count(option_name(name), value, *of)
    shape = _shape(options) if configuration is None else _configured(configuration, options)
    if options.mtp_layers:
        if shape.is_encoder_decoder:
            raise UsageError("`--mtp-layers`: an encoder-decoder has no multi-token prediction", hint="leave it out")
        shape = with_multi_token_prediction(shape, texts.check_count("--mtp-layers", options.mtp_layers, "block", 64))
    precision = chosen_precision(options, default="" if configuration is None else "bf16-mixed")
    half = precision not in ("", "fp32")
    rates, device = _device_rates(options, half=half, experts=shape.has_experts)
    # Without a link, no plan can compare several widths.
    widths = _tensor_parallel(options, shape, several=configuration is not None and device.executor is not None)
    execution = replace(
        _execution(options, shape, widths),
        # A rate that the user gives for one width includes the time of collectives.
        counts_collectives=len(widths) > 1 or (options.rate is None and device.executor is not None),
    )
    profile = transformer_profile(
        shape,
        execution,
        _element_bytes(options, precision, fused=execution.fused),
        rates,
        device=device,
        dtype=precision or "float32",
        optimizer=_optimizer(options),
        micro_batch_sizes=texts.parse_micro_batch_sizes(options.batch_sizes, options.batch),
        # torch's optimizers step all parameters at once; `--state-bytes` describes another engine.
        updates_all_at_once=options.state_bytes is None,
        other_tensor_parallel=widths[1:],
    )
    if max(max(each) for layer in profile.layers for each in (layer.saved_bytes, layer.forward_flops)) > LARGEST:
        raise UsageError("a model of that shape is too large to compute with")
    if configuration is None:
        return profile
    settings = {configuration.kind: configuration.name, **profile.model.settings}
    return replace(profile, model=replace(profile.model, settings=settings))


def refuse_formula_options(options: ProfileOptions) -> None:
    """Raise UsageError if an option is given that needs `--from-formula` or a config.json."""
    _refuse(options, [name for name in _FORMULA_OPTIONS if name != "from_formula"], "`--from-formula`")
    _refuse(options, ["sequence", "task"], "a config.json or a formula")


def _refuse(options: ProfileOptions, names: list[str], owner: str) -> None:
    defaults = {k.name: k for k in option_fields_of(ProfileOptions)}
    for name in names:
        option, value = defaults[name].option, getattr(options, name)
        if value and value != defaults[name].default:
            shown = option.forms if option is not None and option.forms else option_name(name)
            raise UsageError(f"`{shown}` needs {owner}", hint="see `gpipe-plan profile --help`")


def _configured(configuration: Configuration, options: ProfileOptions) -> Transformer:
    for name in _SHAPE_OPTIONS:
        if getattr(options, name):
            raise UsageError(f"`{option_name(name)}`: {configuration.name} has this size", hint="leave it out")
    note_language_model_only(configuration, options)
    family = configuration.content.get("model_type")
    if options.from_formula not in (None, "auto", family):
        raise UsageError(
            f"`--from-formula {options.from_formula}`: {configuration.name} is of `model_type: {family}`",
            hint="leave `--from-formula` out, or use `--from-formula auto`",
        )
    sequence = options.sequence or configuration.usual_sequence
    if options.sequence is None:
        options.note(f"samples have {sequence} tokens; change this with `--sequence`")
    if configuration.content.get("num_nextn_predict_layers") and not options.mtp_layers:
        options.note("multi-token prediction is left out, as transformers does; `--mtp-layers 1` includes it")
    return transformer_from_config(configuration.content, sequence, source=configuration.name, note=options.note)


def _shape(options: ProfileOptions) -> Transformer:
    family = texts.parse_choice("--from-formula", str(options.from_formula), (_GPT, *FAMILIES))
    _check_complete(family, options)
    if family == _GPT:
        return _gpt(options)
    content = {key: getattr(options, name) for name, key in _KEYS.items() if getattr(options, name) is not None}
    if options.feed_forward is not None:
        content |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner"), options.feed_forward)
    content |= {"tie_word_embeddings": True} if options.tied else {}
    content["max_position_embeddings"] = options.sequence
    content.setdefault("num_key_value_heads", options.heads)
    assert options.sequence is not None
    source = f"--from-formula {family}"
    shape = transformer_from_config(
        {**content, "model_type": family}, options.sequence, source=source, note=options.note
    )
    if options.experts is not None and not any(isinstance(block.feed_forward, Experts) for block in shape.blocks):
        raise UsageError(f"`--experts`: the formula `{family}` has no experts", hint="`mixtral` and `qwen3_moe` have")
    return shape


def _check_complete(family: str, options: ProfileOptions) -> None:
    names = list(_NEEDED)
    names += ["feed_forward"] if family not in (_GPT, "gpt2") else []
    names += ["experts", "experts_per_token"] if family in ("mixtral", "qwen3_moe") else []
    missing = [f"`{option_name(name)}`" for name in names if getattr(options, name) is None]
    if options.rate is None and not options.device.startswith(_ESTIMATE):
        missing.append("`--device estimate:h100` or `--rate`")
    if missing:
        *others, last = missing
        listed = f"{', '.join(others)} and {last}" if others else last
        raise UsageError(
            f"`--from-formula {family}` needs {listed}",
            hint="or take the sizes from a configuration: `gpipe-plan profile config.json`, `--preset llama-3-70b`",
        )


def _gpt(options: ProfileOptions) -> Transformer:
    for name in ("key_value_heads", "experts", "experts_per_token"):
        if getattr(options, name) is not None:
            raise UsageError(f"`{option_name(name)}`: the formula `{_GPT}` has none", hint="use `--from-formula llama`")
    sizes: dict[str, int] = {name: getattr(options, name) for name in _NEEDED}
    if sizes["hidden"] % sizes["heads"]:
        raise UsageError(
            f"`--hidden {sizes['hidden']} --heads {sizes['heads']}` do not divide evenly",
            hint="`--hidden` must be a multiple of `--heads`",
        )
    wide = 4 * sizes["hidden"] if options.feed_forward is None else options.feed_forward
    return gpt_transformer(**sizes, feed_forward=wide, tied=options.tied)


def _tensor_parallel(options: ProfileOptions, shape: Transformer, *, several: bool) -> tuple[int, ...]:
    heads = min(block.attention.heads for block in shape.blocks)
    groups = {block.attention.key_value_heads for block in shape.blocks if block.attention.latent is None}
    if options.tensor_parallel == "auto":
        return tuple(t for t in _WIDTHS if heads % t == 0 and _divides(t, groups)) if several else (1,)
    widths = sorted(set(texts.parse_integers("--tensor-parallel", options.tensor_parallel)))
    texts.check_count("--tensor-parallel", widths[-1], "device", heads)
    for width in widths:
        if heads % width:
            raise UsageError(
                f"`--tensor-parallel {width}` does not divide {heads} attention heads evenly",
                hint="the number of heads must be a multiple of `--tensor-parallel`",
            )
        if not _divides(width, groups):
            raise UsageError(
                f"`--tensor-parallel {width}` does not divide {min(groups)} key-value heads evenly",
                hint="one of the two numbers must be a multiple of the other",
            )
    return tuple(widths)


def _divides(width: int, groups: Collection[int]) -> bool:
    return all(count % width == 0 or width % count == 0 for count in groups)


def _execution(options: ProfileOptions, shape: Transformer, widths: tuple[int, ...]) -> ExecutionSettings:
    experts = min((b.feed_forward.count for b in shape.blocks if isinstance(b.feed_forward, Experts)), default=0)
    groups = options.expert_parallel
    if groups > 1 and (not experts or experts % groups):
        raise UsageError(
            f"`--expert-parallel {groups}` does not divide {experts} experts evenly",
            hint="the number of experts must be a multiple of `--expert-parallel`",
        )
    return ExecutionSettings(
        tensor_parallel=widths[0],
        expert_parallel=groups,
        capacity=_capacity(options.capacity),
        sequence_parallel=options.sequence_parallel,
        keep_scores=options.keep_scores,
        recompute_attention=options.recompute_attention,
        # In the papers on Megatron-LM, layer norm and GELU are one kernel each.
        fused=options.fused_kernels or shape.family == _GPT,
    )


def _capacity(value: float | str | None) -> float:
    try:
        number = 1.0 if value is None else float(value)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 100:
        raise UsageError(f"`--capacity {value}`: expected a number from 0.1 to 100, such as 1.25")
    return number


def _element_bytes(options: ProfileOptions, precision: Precision, *, fused: bool) -> ElementBytes:
    mixed = precision.endswith("-mixed")
    activation = 4 if precision in ("", "fp32") else 2
    # Under autocast, sums of half-precision results and float32 states are in float32. Megatron's are not.
    residual = 4 if mixed and not fused else activation
    if options.state_bytes is not None:
        state = _state_bytes(options.state_bytes)
        return ElementBytes(
            activation=activation, residual=residual, parameter=state[0], gradient=state[1], optimizer=state[2]
        )
    width = 4 if mixed else activation
    return ElementBytes(
        activation=activation,
        residual=residual,
        parameter=width,
        gradient=width,
        optimizer=width * _STATES[_optimizer(options)],
        cast=2 if mixed else 0,
    )


def _state_bytes(value: Any) -> tuple[int, ...]:
    numbers = texts.parse_integers("--state-bytes", value)
    if len(numbers) != 3 or max(numbers) > 64:
        raise UsageError(
            f"`--state-bytes {value}`: expected three numbers up to 64",
            hint="bytes of a parameter, its gradient, and its optimizer state with master copies: `2,2,12`",
        )
    return numbers


def _optimizer(options: ProfileOptions) -> str:
    return texts.parse_choice("--optimizer", options.optimizer or "adamw", tuple(_STATES))


def chosen_precision(options: ProfileOptions, *, default: Precision = "") -> Precision:
    """Return the precision of `--dtype`.

    Without `--dtype`, return the usual training precision of the GPU in `--device estimate:GPU`. For other devices,
    return `default`. An empty precision means that the model keeps the dtype in which it was built.
    """
    if options.dtype:
        return texts.parse_precision(options.dtype)
    if options.device.startswith(_ESTIMATE):
        default = accelerator(options.device.removeprefix(_ESTIMATE)).usual_precision
    if default:
        options.note(f"precision {default}, as in most training; change this with `--dtype`")
    return default


def _device_rates(options: ProfileOptions, *, half: bool, experts: bool) -> tuple[DeviceRates, Device]:
    rate = None if options.rate is None else texts.parse_rate("--rate", options.rate)
    if not options.device.startswith(_ESTIMATE):
        if rate is None or options.device != "cpu":
            raise UsageError(
                f"a formula needs an estimated device, got `--device {options.device}`",
                hint="use `--device estimate:a100-80gb`, or give the sustained rate: `--rate 190TFLOP/s`",
            )
        return DeviceRates(flops_per_s=rate), Device(kind="cuda", name=f"at {rate / 1e12:g} TFLOP/s", how="estimated")
    absent = accelerator_with_rates(options.device.removeprefix(_ESTIMATE))
    sustained = sustained_rate(absent.name, experts=experts) if half and rate is None else None
    if sustained is not None:
        rate = sustained.flops_per_s
        options.note(
            f"times assume {rate / 1e12:g} TFLOP/s, which published runs on {sustained.chip} sustained; "
            "change this with `--rate`"
        )
    if rate is None:
        rate = absent.half_flops_per_s if half else absent.float32_flops_per_s
        options.note(
            f"times assume the data sheet's peak of {rate / 1e12:g} TFLOP/s, which no model reaches; "
            "give the sustained rate with `--rate`"
        )
    device = Device(
        kind=absent.name if absent.name.startswith("tpu") else "cuda",
        name=absent.full_name,
        memory_bytes=absent.memory_bytes,
        reserve_bytes=ASSUMED_RESERVE_BYTES,
        how="estimated",
        executor=None if absent.link == Link() else ExecutorCost(overhead_us=0.0, link=absent.link),
    )
    return DeviceRates(flops_per_s=rate, bytes_per_s=absent.bytes_per_s), device
