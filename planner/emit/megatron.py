"""Emitter for Megatron-Core 0.16: the option `--pipeline-model-parallel-layout`.

The option's value is a string of layers, with `|` between stages:

    E      embedding
    t      transformer block; `t*3` means `ttt`
    m      layer of multi-token prediction
    L      loss and the layers just before it

Stages are listed in the order of the model. If there are more stages than devices, Megatron runs the schedule
`interleaved`. The format is experimental (docs.nvidia.com/megatron-core, "Custom Pipeline Model Parallel Layout";
megatron/core/transformer/pipeline_parallel_layer_layout.py).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from planner.core.errors import UsageError
from planner.core.schedule import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from planner.core.values.profile import LayerProfile
from planner.emit.layout import EngineFile, PlanLayout, signed_text

MEGATRON_SCHEDULES: Final = (ONE_FORWARD_ONE_BACKWARD, INTERLEAVED)
"""Schedules that Megatron-LM runs."""

_NAME: Final = "Megatron-LM"
_OPTION: Final = "--pipeline-model-parallel-layout"
_NUMBERED = re.compile(r"(?P<stem>.*[^\W\d].*?)(?P<number>\d+)(?P<rest>\D.*)?")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)\w*(?:\.(?:layers\.)?(?P<number>\d+))?")


def emit_megatron(layout: PlanLayout) -> EngineFile:
    """Return a shell file that defines an array with Megatron's options.

    Raises:
        UsageError: The layers are not an embedding, blocks and a head, or a cut is inside one of them. Also raised if
            layers of multi-token prediction are in several stages.
    """
    layout.refuse_formula(_NAME, block_kind="block")
    plan = layout.plan
    kinds = _layer_groups(layout.layers)
    letters = []
    end = 0
    for stage in layout.stages:
        first, end = end, end + len(stage)
        if first and kinds[first - 1] == kinds[first]:
            raise UsageError(
                f'Megatron-LM cuts between transformer blocks, the plan between "{layout.layers[first - 1].name}" and '
                f'"{layout.layers[first].name}", which are {_described(kinds[first])}',
                hint=f"solve with `--together {layout.layers[first - 1].name},{layout.layers[first].name}`",
            )
        letters.append([letter for (letter, _), _ in groupby(kinds[first:end])])
    _check_one_mtp_stage(layout, letters)
    num_mtp = sum(stage.count("m") for stage in letters)
    text = "|".join("".join(_times(letter, len(list(run))) for letter, run in groupby(stage)) for stage in letters)
    runs = MEGATRON_SCHEDULES[::-1] if plan.chunks > 1 else MEGATRON_SCHEDULES
    notes = [
        *layout.schedule_notes(_NAME, *runs),
        *layout.recompute_notes("Megatron-LM recomputes equally on all stages: set `--recompute-granularity`"),
    ]
    if layout.expert_parallel > 1 and plan.tensor_parallel > 1 and not layout.sequence_parallel:
        notes.append(
            f"{_NAME} divides experts and shares layers only with `--sequence-parallel`: profile with it as well"
        )
    body = (
        "PIPELINE_ARGS=(\n"
        + "".join(f"    {option}\n" for option in _assumed_options(layout))
        + f"    --pipeline-model-parallel-size {plan.num_devices}\n"
        f'    {_OPTION} "{text}"\n'
        f"    --micro-batch-size {plan.micro_batch_size}\n"
        f"    --global-batch-size {plan.inputs.batch}\n"
        + (f"    --mtp-num-layers {num_mtp}\n" if num_mtp else "")
        + ")\n"
    )
    use = 'Use it:\n    source plan_megatron.sh\n    torchrun … pretrain_gpt.py "${PIPELINE_ARGS[@]}" …'
    return EngineFile(
        name="plan_megatron.sh",
        text=signed_text(layout, body, engine="Megatron-Core 0.16", option="megatron", notes=notes, docstring=use),
        notes=tuple(notes),
        use='`source plan_megatron.sh`, then `pretrain_gpt.py "${PIPELINE_ARGS[@]}" …`',
    )


def _assumed_options(layout: PlanLayout) -> Iterator[str]:
    if layout.plan.tensor_parallel > 1:
        yield f"--tensor-model-parallel-size {layout.plan.tensor_parallel}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.plan.shards_optimizer:
        yield "--use-distributed-optimizer"
    if layout.expert_parallel > 1:
        yield f"--expert-model-parallel-size {layout.expert_parallel}"
    # All stages have the same granularity. If a stage recomputes whole layers, a note is written instead.
    if layout.recompute_attention and all(stage.recompute == "never" for stage in layout.plan.stages):
        yield "--recompute-granularity selective"


def balance_of_layout(text: str, layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    """Return the number of profiled layers in each stage of a Megatron layout string.

    Raises:
        UsageError: The text is not a layout, or is for another model.
    """
    kinds = [kind for kind, _ in groupby(_layer_groups(layers))]
    sizes = [len(list(run)) for _, run in groupby(_layer_groups(layers))]
    flat = text.replace(",", "").replace(" ", "")
    expected = "".join(letter for letter, _ in kinds)
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"(.)\*(\d+)"):
        flat = re.sub(pattern, lambda repeat: _expanded(repeat, most=2 * len(kinds)), flat)
    if flat.replace("|", "") != expected:
        raise UsageError(
            f"the layout `{text}` is {flat.replace('|', '')}, but the profile's layers are {expected}",
            hint="expected one E, a t for every transformer block, an m for every layer of multi-token prediction, "
            "and one L; empty stages have no counterpart in a plan",
        )
    balance, first = [], 0
    for stage in flat.split("|"):
        balance.append(sum(sizes[first : first + len(stage)]))
        first += len(stage)
    return tuple(balance)


def _expanded(repeat: re.Match[str], *, most: int) -> str:
    # Nested repetitions could expand to gigabytes.
    if len(repeat[1]) * int(repeat[2]) > most:
        raise UsageError(f"the layout repeats `{repeat[1][:20]}` {repeat[2]} times, more than the profile has layers")
    return repeat[1] * int(repeat[2])


LayerGroup = tuple[str, int]
"""Letter of a layer in a layout string (E, t, m or L), and number of its block or multi-token prediction layer.

The number is 0 for E and L. Consecutive layers with the same letter and number are written as one letter.
"""


def _layer_groups(layers: Sequence[LayerProfile]) -> list[LayerGroup]:
    blocks = _block_numbers(layers) or _indices_of_equal_layers(layers)
    inside = [n for n, block in enumerate(blocks) if block is not None]
    if not inside or None in blocks[inside[0] : inside[-1]]:
        raise UsageError(
            "cannot tell which layers are the transformer blocks: they have neither numbered names nor equal digests",
            hint="Megatron-LM runs its own GPT: an embedding, blocks named like `h.0`, `h.1`, …, and a head",
        )
    mtp_names = [_MTP.search(layer.name) for layer in layers]
    predicting = [n for n, match in enumerate(mtp_names) if match and n > inside[-1]]
    if inside[0] == 0 or max([inside[-1], *predicting]) == len(layers) - 1:
        raise UsageError(
            f'Megatron-LM\'s model begins with an embedding and ends with a head, this model with "{layers[0].name}" '
            f'and "{layers[-1].name}"',
            hint="a plan for another model does not fit it; use another `--format`",
        )
    kinds: list[LayerGroup] = []
    for n, block in enumerate(blocks):
        if block is not None:
            kinds.append(("t", block))
        elif n < inside[0] or not predicting or n > predicting[-1]:
            kinds.append(("E" if n < inside[0] else "L", 0))
        else:
            # A norm before the layers of multi-token prediction has no letter of its own.
            match = mtp_names[max(n, predicting[0])]
            kinds.append(("m", int(match["number"] or 0)) if match else kinds[-1])
    return kinds


def _check_one_mtp_stage(layout: PlanLayout, letters: Sequence[Sequence[str]]) -> None:
    stages = [k for k, stage in enumerate(letters) if "m" in stage]
    if len(stages) < 2:
        return
    names = [layer.name for layer in layout.layers if _MTP.search(layer.name)]
    raise UsageError(
        "Megatron-LM runs all layers of multi-token prediction in one stage, but the plan in stages "
        + ", ".join(map(str, stages)),
        hint=f"solve with `--together {names[0]},{names[-1]}`",
    )


def _block_numbers(layers: Sequence[LayerProfile]) -> list[int | None]:
    # The blocks are the largest group of layers with equal text before a number, such as `h.0`, `h.1` and `h.2`.
    matches = [None if _MTP.search(layer.name) else _NUMBERED.fullmatch(layer.name) for layer in layers]
    stem = _most_common(match["stem"] for match in matches if match)
    return [int(match["number"]) if match and match["stem"] == stem else None for match in matches] if stem else []


def _indices_of_equal_layers(layers: Sequence[LayerProfile]) -> list[int | None]:
    # Layers with equal digests run the same operators on the same shapes. The blocks are the largest group of them.
    digests = ["" if _MTP.search(layer.name) else layer.digest for layer in layers]
    commonest = _most_common(filter(None, digests))
    return [n if digest == commonest else None for n, digest in enumerate(digests)] if commonest else []


def _most_common(texts: Iterable[str]) -> str:
    ((text, count),) = Counter(texts).most_common(1) or [("", 0)]
    return text if count > 1 else ""


def _times(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def _described(kind: LayerGroup) -> str:
    letter, number = kind
    whole = {"E": "the embedding", "L": "the head", "m": f"layer {number}", "t": f"block {number}"}[letter]
    return f"both part of {whole}"
