"""Options of `profile`, for a model or for a formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

from planner.api.option import Option, ignore
from planner.api.texts import File, Numbers, Progress
from planner.core.values.calibration import Calibration
from planner.core.values.precision import PRECISIONS
from planner.core.values.profile import Granularity

_MODEL: Final = "Model"
_WHERE: Final = "Device and sizes"
_EFFORT: Final = "Time and repeats"
_FORMULA: Final = "Formula instead of a model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """Sizes of a model for `profile --from-formula`; a configuration has all but `sequence`."""

    layers: Annotated[int | None, Option("32", "Number of blocks between embedding and head.", _FORMULA)] = None
    hidden: Annotated[int | None, Option("3072", "Model width.", _FORMULA)] = None
    heads: Annotated[int | None, Option("24", "Number of attention heads.", _FORMULA)] = None
    key_value_heads: Annotated[int | None, Option("8", "Number of key-value heads; default: --heads.", _FORMULA)] = None
    vocabulary: Annotated[int | None, Option("32000", "Vocabulary size.", _FORMULA)] = None
    feed_forward: Annotated[
        int | None, Option("12288", "Feed-forward width; default: 4 times --hidden, as in GPT.", _FORMULA)
    ] = None
    experts: Annotated[int | None, Option("8", "Number of experts of a block.", _FORMULA)] = None
    experts_per_token: Annotated[int | None, Option("2", "Number of experts that a token uses.", _FORMULA)] = None
    tied: Annotated[bool, Option("", "Share the head's weights with the embedding.", _FORMULA)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaOptions(ShapeOptions):
    """Options of `profile --from-formula`; `planner.api.formula` computes the profile."""

    from_formula: Annotated[
        str | None,
        Option(
            "transformer|llama|…|auto|never",
            "Formula by name; auto: the configuration's; never: build its model.",
            _FORMULA,
        ),
    ] = None
    preset: Annotated[
        str | None, Option("llama-3-70b", "Configuration of a well-known model, instead of a file.", _FORMULA)
    ] = None
    tensor_parallel: Annotated[
        Numbers,
        Option("auto|1,2,4,8", "GPUs that share each layer; auto: 1, of a configuration 1,2,4,8.", _FORMULA),
    ] = "auto"
    expert_parallel: Annotated[int, Option("N", "Groups of devices that share the experts.", _FORMULA)] = 1
    capacity: Annotated[
        str | float | None, Option("1.25", "Tokens per expert, relative to an even distribution.", _FORMULA)
    ] = None
    mtp_layers: Annotated[
        int, Option("N", "Blocks that predict further tokens (DeepSeek-V3); default: none.", _FORMULA)
    ] = 0
    rate: Annotated[
        str | float | None,
        Option("190TFLOP/s", "Sustained rate of a device; default: that of published runs.", _FORMULA),
    ] = None
    state_bytes: Annotated[
        str | Sequence[int] | None,
        Option(
            "2,2,12",
            "Bytes per parameter, gradient and optimizer state; 2,2,12 is Megatron fp16.",
            _FORMULA,
        ),
    ] = None
    sequence_parallel: Annotated[bool, Option("", "Split the other layers along the sequence.", _FORMULA)] = False
    keep_scores: Annotated[bool, Option("", "Save attention scores (no fused kernel).", _FORMULA)] = False
    recompute_attention: Annotated[
        bool, Option("", "Recompute attention in backward (selective recomputation).", _FORMULA)
    ] = False
    fused_kernels: Annotated[
        bool, Option("", "Fuse norms, rotations and gated activations, as Megatron does.", _FORMULA)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(FormulaOptions):
    """Options of `profile`."""

    sequence: Annotated[int | None, Option("4096", "Tokens per sample, of a formula or a configuration.", _WHERE)] = (
        None
    )
    task: Annotated[
        str | None,
        Option("causal-lm|seq2seq", "Head of a configuration's model; default: its `architectures`.", _MODEL),
    ] = None
    output: Annotated[File | None, "File of the profile; the model's path in it is relative to its folder."] = None
    batch_sizes: Annotated[
        Numbers,
        Option(
            "auto|1,2,4,8",
            "Micro-batch sizes to measure; auto: powers of two up to --batch that fit into memory.",
            _WHERE,
        ),
    ] = "auto"
    batch: Annotated[
        int | None, Option("B", "Largest micro-batch size to measure, for --batch-sizes auto; default: 8.", _WHERE)
    ] = None
    device: Annotated[
        str,
        Option(
            "cpu|cuda|tpu|tpu:v2|estimate:h100",
            "Device to measure; tpu:v2 to tpu:v6e compile, estimate:h100 estimates.",
            _WHERE,
        ),
    ] = "cpu"
    optimizer: Annotated[
        str | None, Option("NAME", "adamw, adam, sgd, …; default: the file's build_optimizer or adamw.", _MODEL)
    ] = None
    dtype: Annotated[str | None, Option("|".join(PRECISIONS), "Precision; default: as the model is built.", _MODEL)] = (
        None
    )
    settings: Annotated[
        Mapping[str, object] | Sequence[str] | None,
        Option("NAME=VALUE", "Argument of build_model (repeatable).", _MODEL, repeatable=True, forms="--set"),
    ] = None
    inputs: Annotated[
        Sequence[str] | None,
        Option(
            "3x224x224",
            "Input shape[:dtype[:bound]] if there is no example_batch (repeatable).",
            _MODEL,
            repeatable=True,
            forms="--input",
        ),
    ] = None
    threads: Annotated[int, Option("N", "CPU threads per stage.", _WHERE)] = 1
    granularity: Annotated[
        str, Option("|".join(get_args(Granularity)), "One layer per block, or also cuts inside blocks.", _MODEL)
    ] = "coarse"
    repeat: Annotated[int, Option("N", "Smallest number of timed repeats of every layer.", _EFFORT)] = 10
    time_budget: Annotated[str, Option("60s", "Time limit for additional repeats; 0s: none.", _EFFORT)] = "60s"
    proof_budget: Annotated[
        str,
        Option("30s", "Time limit for checking stages against the unpartitioned model; 0s: none.", _EFFORT),
    ] = "30s"
    calibration: Annotated[
        File | Calibration | None,
        Option("FILE", "Use executor and link costs measured by `verify`.", _EFFORT),
    ] = None
    example_batch: Annotated[
        Callable[[int], tuple[Any, Any]] | None,
        "For an `nn.Module`: maps a batch size to `(inputs, targets)`.",
    ] = None
    loss_fn: Annotated[
        Callable[[Any, Any], Any] | None,
        (
            "For an `nn.Module`: maps output and target to a scalar; default: the output's `.loss`, else the only "
            "scalar in it with a gradient, else its mean."
        ),
    ] = None
    progress: Annotated[Progress, "Called during the measurement."] = ignore
    note: Annotated[Callable[[str], None], "Called with assumed defaults and the equivalence check's result."] = ignore
    warn: Annotated[Callable[[str], None], "Called with warnings."] = ignore
