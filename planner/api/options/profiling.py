"""What `profile` takes beside the model, or the shape of one that is not there yet."""

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
_EFFORT: Final = "How long it measures"
_FORMULA: Final = "Without a model, by formula"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaOptions:
    """The shape of a model that is not there yet, for `profile`; `planner.api.formula` makes a profile of it."""

    from_formula: Annotated[
        str | None, Option("transformer", "By published formulas, for --device estimate:… or a --rate.", _FORMULA)
    ] = None
    layers: Annotated[int | None, Option("32", "Blocks between embedding and head.", _FORMULA)] = None
    hidden: Annotated[int | None, Option("3072", "Width.", _FORMULA)] = None
    heads: Annotated[int | None, Option("24", "Attention heads.", _FORMULA)] = None
    sequence: Annotated[int | None, Option("2048", "Tokens of a sample.", _FORMULA)] = None
    vocabulary: Annotated[int | None, Option("32000", "Words.", _FORMULA)] = None
    feed_forward: Annotated[
        int | None, Option("12288", "Width of the feed-forward layers; default: 4 times --hidden.", _FORMULA)
    ] = None
    tensor_parallel: Annotated[int, Option("T", "Devices that share each layer; one stage is T devices.", _FORMULA)] = 1
    rate: Annotated[
        str | float | None,
        Option("190TFLOP/s", "What a device sustains; default: the peak of its data sheet.", _FORMULA),
    ] = None
    state_bytes: Annotated[
        str | Sequence[int] | None,
        Option(
            "2,2,12",
            "Bytes per parameter: itself, gradient, optimizer (2,2,12: Megatron in fp16); default: as --dtype trains.",
            _FORMULA,
        ),
    ] = None
    sequence_parallel: Annotated[
        bool, Option("", "What tensor parallelism leaves whole is split along the sequence.", _FORMULA)
    ] = False
    keep_scores: Annotated[bool, Option("", "Attention keeps its scores: no fused kernel.", _FORMULA)] = False
    tied: Annotated[bool, Option("", "The head has the embedding's weights.", _FORMULA)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(FormulaOptions):
    """What `profile` takes beside the model."""

    output: Annotated[File | None, "Where to write the profile; the model's path in it is relative to it."] = None
    batch_sizes: Annotated[
        Numbers,
        Option(
            "auto|1,2,4,8",
            "Micro-batch sizes to measure; the solver chooses among them. `auto`: powers of two up to `--batch` "
            "while they fit into memory, without those too small for batch normalization.",
            _WHERE,
        ),
    ] = "auto"
    batch: Annotated[
        int | None, Option("B", "Samples per optimizer step, for `--batch-sizes auto`; default: 8.", _WHERE)
    ] = None
    device: Annotated[
        str,
        Option(
            "cpu|cuda|tpu|tpu:v2|estimate:h100",
            "What to measure on; tpu:v2 (…v6e) compiles for a TPU that is not here, estimate:h100 estimates.",
            _WHERE,
        ),
    ] = "cpu"
    optimizer: Annotated[
        str | None, Option("NAME", "adamw, adam, sgd, …; default: the file's build_optimizer, or adamw.", _MODEL)
    ] = None
    dtype: Annotated[
        str | None, Option("|".join(PRECISIONS), "Precision to run in; default: as the model is built.", _MODEL)
    ] = None
    settings: Annotated[
        Mapping[str, object] | Sequence[str] | None,
        Option("NAME=VALUE", "A setting of build_model; repeatable.", _MODEL, repeatable=True, forms="--set"),
    ] = None
    inputs: Annotated[
        Sequence[str] | None,
        Option(
            "3x224x224",
            "Input shape[:dtype[:bound]], without example_batch; repeatable.",
            _MODEL,
            repeatable=True,
            forms="--input",
        ),
    ] = None
    threads: Annotated[int, Option("N", "CPU threads per stage.", _WHERE)] = 1
    granularity: Annotated[
        str, Option("|".join(get_args(Granularity)), "About one layer per block, or cuts inside blocks too.", _MODEL)
    ] = "coarse"
    repeat: Annotated[
        int, Option("N", "Timed repeats of every layer, at least; more while times are in doubt.", _EFFORT)
    ] = 10
    time_budget: Annotated[
        str, Option("60s", "Begin no repeats beyond `--repeat` after timing for so long; 0s: none.", _EFFORT)
    ] = "60s"
    proof_budget: Annotated[
        str,
        Option("30s", "Hold stages against the whole model for about so long, on all cores; 0s: not at all.", _EFFORT),
    ] = "30s"
    calibration: Annotated[
        File | Calibration | None,
        Option("FILE", "Executor and link as `verify` measured them, instead of measuring them.", _EFFORT),
    ] = None
    example_batch: Annotated[
        Callable[[int], tuple[Any, Any]] | None, "For an `nn.Module`: from a batch size to `(inputs, targets)`."
    ] = None
    loss_fn: Annotated[
        Callable[[Any, Any], Any] | None,
        (
            "For an `nn.Module`: from output and target to a scalar; without it the output's own `.loss`, else the one "
            "scalar in it that carries a gradient, else its mean."
        ),
    ] = None
    progress: Annotated[Progress, "Called as layers are measured."] = ignore
    note: Annotated[Callable[[str], None], "Called with defaults that were taken, and what was proven."] = ignore
    warn: Annotated[Callable[[str], None], "Called with what may be wrong."] = ignore
