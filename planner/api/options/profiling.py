"""Options of `profile`, for a model or for a formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

from planner.api.option import Option, ignore_arguments
from planner.api.texts import File, Numbers, Progress
from planner.core.values.calibration import Calibration
from planner.core.values.precision import PRECISIONS
from planner.core.values.profile import Granularity

_MODEL: Final = "Model"
_WHERE: Final = "Device and sizes"
_EFFORT: Final = "Time and repeats"
_FORMULA: Final = "Formula instead of a model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizeOptions:
    """Sizes of a model for `profile --from-formula`. They are not allowed with a config.json, which has these sizes."""

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
class FormulaOptions(ModelSizeOptions):
    """Options of `profile --from-formula`; `planner.api.formula` computes the profile."""

    from_formula: Annotated[
        str | None,
        Option(
            "transformer|llama|…|auto|never",
            "Formula to use; auto: by the config.json; never: build the model and measure it.",
            _FORMULA,
        ),
    ] = None
    preset: Annotated[str | None, Option("llama-3-70b", "Well-known model, instead of a config.json.", _FORMULA)] = None
    tensor_parallel: Annotated[
        Numbers,
        Option("auto|1,2,4,8", "GPUs that share each layer; auto: 1,2,4,8 for a config.json, else 1.", _FORMULA),
    ] = "auto"
    expert_parallel: Annotated[
        int, Option("N", "Number of replicas among which the experts of a layer are divided.", _FORMULA)
    ] = 1
    capacity: Annotated[
        str | float | None,
        Option("1.25", "Tokens that each expert processes, relative to an even distribution.", _FORMULA),
    ] = None
    mtp_layers: Annotated[
        int, Option("N", "Number of blocks for multi-token prediction, as in DeepSeek-V3.", _FORMULA)
    ] = 0
    rate: Annotated[
        str | float | None,
        Option("190TFLOP/s", "Sustained rate of a device; default: the rate of published runs.", _FORMULA),
    ] = None
    state_bytes: Annotated[
        str | Sequence[int] | None,
        Option(
            "2,2,12",
            "Bytes of a parameter, its gradient and its optimizer state; Megatron fp16: 2,2,12.",
            _FORMULA,
        ),
    ] = None
    sequence_parallel: Annotated[
        bool, Option("", "Also split norms and dropout among the GPUs, along the sequence.", _FORMULA)
    ] = False
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

    sequence: Annotated[int | None, Option("4096", "Tokens per sample, for a formula or a config.json.", _WHERE)] = None
    task: Annotated[
        str | None,
        Option("causal-lm|seq2seq", "Task of a config.json's model; default: by its `architectures`.", _MODEL),
    ] = None
    output: Annotated[File | None, "File of the profile; it names the model's file relative to its own folder."] = None
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
            "Device to measure; tpu:v2 to tpu:v6e: compile only; estimate:h100: estimate only.",
            _WHERE,
        ),
    ] = "cpu"
    optimizer: Annotated[
        str | None,
        Option("NAME", "Optimizer: adamw, adam, sgd, …; default: build_optimizer of model.py, else adamw.", _MODEL),
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
            "Shape of an input without the batch, if there is no example_batch; `1024:int64:32000` for integers below "
            "32000 (repeatable).",
            _MODEL,
            repeatable=True,
            forms="--input",
        ),
    ] = None
    threads: Annotated[int, Option("N", "CPU threads per stage.", _WHERE)] = 1
    granularity: Annotated[
        str,
        Option("|".join(get_args(Granularity)), "coarse: one layer per block; fine: also cut inside blocks.", _MODEL),
    ] = "coarse"
    repeat: Annotated[int, Option("N", "Smallest number of timed repeats of every layer.", _EFFORT)] = 10
    time_budget: Annotated[
        str, Option("60s", "Time limit for repeats beyond --repeat; 0s: no further repeats.", _EFFORT)
    ] = "60s"
    proof_budget: Annotated[
        str,
        Option("30s", "Time limit of the check that stages give the same results as the model; 0s: no check.", _EFFORT),
    ] = "30s"
    calibration: Annotated[
        File | Calibration | None,
        Option(
            "FILE",
            "Do not measure costs of executor and links, but copy those measured by `verify`.",
            _EFFORT,
        ),
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
    progress: Annotated[Progress, "Called during the measurement."] = ignore_arguments
    note: Annotated[Callable[[str], None], "Called with assumed defaults and the equivalence check's result."] = (
        ignore_arguments
    )
    warn: Annotated[Callable[[str], None], "Called with warnings."] = ignore_arguments
