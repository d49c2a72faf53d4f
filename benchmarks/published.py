"""Published runs on real accelerators beside what the cost model predicts: docs/measurements/published.md.

    python -m benchmarks.published > docs/measurements/published.md

From the root of a checkout; a minute on one core, without torch. Figures and sources: `benchmarks/data/published`.
"""

import textwrap
from collections.abc import Iterable, Sequence

from benchmarks import published_chips as chips
from benchmarks import published_formulas as formulas
from benchmarks import published_rates as rates
from benchmarks import published_runs as runs
from benchmarks.published_runs import Cuts, Row

VOCABULARY, ZERO_BUBBLE, RECOMPUTATION, MEGATRON, GPIPE = (
    f"[{number}](https://arxiv.org/abs/{number})"
    for number in ("2411.05288", "2401.10241", "2205.05198", "2104.04473", "1811.06965")
)
_WIDTH = 125


def main() -> None:
    """Print the page."""
    print("# Published runs on real accelerators\n")
    say(
        """Made by `python -m benchmarks.published`. We ran none of this. Measured figures are published by others,
        and copied with their sources to [benchmarks/data/published](../../benchmarks/data/published/README.md).
        Predictions are those of the [cost model](../cost-model.md), from profiles written by hand from the same
        publications. *Difference* is (predicted - measured) / measured. + means that the predicted time is too
        long, the predicted memory too large, or the predicted throughput too high. README and cost model state
        measured / predicted - 1, which has the opposite sign. Each section gives the reason for large differences.
        `tests/unit/test_published.py` fails if a difference changes."""
    )
    for section in (
        _a100,
        _forecasts,
        _gh200,
        _split_backward_runs,
        _recomputation,
        _even_stages,
        _memory,
        _formula_times,
        _golden_memory,
        _rates,
        _given_rates,
        _other_chips,
        _left_out,
    ):
        section()


def say(text: str, *, first: str = "", rest: str = "") -> None:
    """Print a paragraph, filled to the width of the page; no line begins with a percent sign."""
    options = {"break_long_words": False, "break_on_hyphens": False}
    plain = " ".join(text.split()).replace(" %", "\0%")
    filled = textwrap.fill(plain, _WIDTH, initial_indent=first, subsequent_indent=rest, **options)
    print(filled.replace("\0", " ") + "\n")


def table(header: str, lines: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; columns whose title ends with `:` hold numbers."""
    titles = [title.strip() for title in header.split("|")]
    print("| " + " | ".join(title.removesuffix(":") for title in titles) + " |")
    print("|" + "|".join("---:" if title.endswith(":") else "---" for title in titles) + "|")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def percent(share: float) -> str:
    """Return a signed share: `-1.5 %`; a zero has no sign."""
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def span(rows: Iterable[Row]) -> str:
    """Return the smallest and the largest error."""
    errors = sorted(row.error for row in rows)
    return f"{percent(errors[0])} to {percent(errors[-1])}"


def cells(row: Row, digits: int = 3) -> list[str]:
    """Return name, measured, predicted and difference."""
    return [*row.name, f"{row.measured:.{digits}f}", f"{row.predicted:.{digits}f}", percent(row.error)]


def _a100() -> None:
    rows = list(runs.a100_rows())
    print("## GPT on 8 A100: nothing fitted\n")
    say(
        f"""A GPT of 32 layers, 1F1B, 128 micro-batches of one sample of 2048 tokens ({VOCABULARY}, artifact). The
        profile has one layer per stage, with the forward and backward times that the run recorded. Difference:
        {span(rows)}. The record has no times of transfers, of the optimizer's step and of the gradient norm, so
        the prediction lacks them."""
    )
    table("words | cut | measured, s: | predicted, s: | difference:", map(cells, rows))


def _forecasts() -> None:
    rows, cuts = list(runs.forecast_rows()), list(runs.cut_rows())
    print("## One plan from another plan's times\n")
    say(
        f"""The authors moved layers off the last stage by hand. Here the step of their plan is predicted from
        measured times of another plan, whose stages have four blocks each. A block takes a quarter of a mean middle
        stage, and the rest of the first and last stage is embedding and head. Difference: {span(rows)}. With 64k
        words the prediction is too short: the measured stage of five blocks took 3.9 % longer than 5/4 of a stage
        of four. For comparison, the measured step of the plan with equal stages differs from that of the authors'
        plan by up to {percent(_largest_change(rows))}."""
    )
    table("words | measured, s: | forecast, s: | difference:", map(cells, rows))
    say(
        f"""`gpipe-plan solve` found cuts of the same layers, under the same schedule and without memory limits.
        Predicted steps of these cuts are up to {100 * max(c.gain for c in cuts):.1f} % shorter than those of the
        authors' cuts, and never longer. The first stage includes the embedding, the last one the head."""
    )
    header = "by hand | solved | by hand, s: | solved, s: | shorter by: | status"
    table(f"words | {header}", map(_cut_cells, cuts))


def _largest_change(rows: Sequence[Row]) -> float:
    even = runs.read("gpt-8xa100")[::2]
    return max(float(line["measured_ms"]) / 1e3 / row.measured - 1 for line, row in zip(even, rows, strict=True))


def _cut_cells(cuts: Cuts) -> list[str]:
    plan = cuts.solved
    return [
        cuts.vocabulary,
        ", ".join(map(str, cuts.authors)),
        ", ".join(map(str, plan.balance)),
        f"{cuts.authors_s:.3f}",
        f"{plan.predicted.step_us / 1e6:.3f}",
        f"{100 * cuts.gain:.1f} %",
        plan.solver.status,
    ]


def _gh200() -> None:
    fitted, *rows = runs.gh200_rows()
    print("## OPT-350M on GH200: one number fitted\n")
    say(
        f"""Layer times, plans and steps of Sailor (SOSP 2025): micro-batches of 8 samples, 1F1B on two stages of 12
        and 14 layers, tensor parallelism with 4 GPUs in each stage, and replicas whose all-reduce takes the
        recorded time. One number is fitted, on the row of plan {fitted.name[0]}: a transfer keeps a stage busy for
        {runs.gh200_crossing_us() / 1e3:.2f} ms. Difference of the other rows: {span(rows)}."""
    )
    table("plan | replicas | M | measured, s: | predicted, s: | difference:", map(cells, (fitted, *rows)))


def _split_backward_runs() -> None:
    searched = list(runs.searched_rows())
    rows = sorted([*runs.zero_bubble_rows(), *searched], key=lambda row: [_number(text) for text in row.name[:2]])
    fitted: dict[str, list[Row]] = {}
    lines = []
    for model in dict.fromkeys(row.name[0] for row in rows):
        of_model = [row for row in rows if row.name[0] == model]
        for row, again in zip(of_model, runs.scaled(of_model, of_model[0]), strict=True):
            fitted.setdefault(row.name[2], []).append(again)
            lines.append([*cells(row), percent(again.error)])
    print("## Schedules with split backward, on A100\n")
    say(
        f"""GPTs of 1.5 to 28 billion parameters, with the published times of F, I, W and transfers ({ZERO_BUBBLE}).
        Measured steps follow from samples per GPU and second, which are published with two or three digits.
        Without fitting, predictions are too short, {span(rows)}: the paper has one time for all stages, although
        the slowest stage determines the step, and no time of the optimizer. *Fitted*: all compute times are
        multiplied by a factor that follows from each model's 1F1B row with the smallest M. Differences are then
        {span(fitted["1f1b"])} for 1F1B, {span(fitted["zb1p"])} for ZB-1p (predicted as ZB-H1, which has the same
        bubbles in the paper), {span(fitted["zb2p"])} for ZB-2p (predicted by `--schedule search` with memory for
        2·K micro-batches on each device), and {span(fitted["interleaved"])} for interleaved 1F1B. The paper's
        ZB-2p does not synchronize devices in the optimizer's step, which saves it 8 %. Its interleaved 1F1B has
        one layer per chunk, and Megatron-LM's stages wait for transfers, while the cost model assumes overlap. So a
        predicted advantage of interleaved 1F1B of a few percent over split backwards is not reliable."""
    )
    table("model | M | schedule | measured, s: | predicted, s: | difference: | fitted:", lines)


def _number(text: str) -> float:
    return float(text.removesuffix("B"))


def _recomputation() -> None:
    rows, forecasts = list(runs.recomputation_rows()), list(formulas.recomputation_forecast_rows())
    print("## Recomputation, on A100\n")
    say(
        f"""Megatron-LM with tensor parallelism on 8 GPUs ({RECOMPUTATION}, tables 4 and 5). The first row compares
        the rule for recomputation, 2 F + B, with a measured layer, in ms. The other rows are the step of the 22B
        model, which is not a pipeline, predicted from its layers, in s. The second row lacks embedding, head,
        loss and optimizer, because the paper does not time them. For the third row, their time is the
        difference measured - predicted of the second row. Selective recomputation inside a layer is not
        planned here: such a layer has its measured time."""
    )
    table("what | measured: | predicted: | difference:", map(cells, rows))
    say(
        f"""Pipelines of 8, 35 and 64 stages: steps with full recomputation, predicted by formula. The sustained rate
        of a device follows from the runs without full recomputation (selective, with sequence parallelism).
        Difference: {span(forecasts)}."""
    )
    table("model | sustained, TFLOP/s | measured, s: | forecast, s: | difference:", map(cells, forecasts))


def _even_stages() -> None:
    rows = list(runs.even_stage_rows())
    transformers = [row for row in rows if row.name[1].startswith("Transformer")]
    rest = [row for row in rows if row not in transformers]
    print("## Throughput over the number of devices\n")
    say(
        f"""GPipe with full recomputation ({GPIPE}, tables 2 and 3): throughput relative to that on two devices. No
        layer times were published, so stages are assumed to be equal. Transformers can be cut into nearly equal
        stages: {span(transformers)}. AmoebaNet: {span(rest)}, too high, because its layers differ and so do its
        stages, as the paper says. On P100 every transfer also goes through the host."""
    )
    table("source | model | from K | to K | M | measured: | predicted: | difference:", (cells(row, 2) for row in rows))


def _memory() -> None:
    rows, halves = (list(formulas.vocabulary_memory_rows(name)) for name in ("1f1b", "v-half"))
    zero = list(formulas.zero_bubble_memory_rows())
    print("## Memory by formula\n")
    say(
        f"""Peaks of the fullest device, from profiles of `gpipe-plan profile --from-formula transformer`. No number
        of the runs is used. {len(rows)} settings of {VOCABULARY}, table 5, "baseline" under 1F1B (`--dtype bf16
        --state-bytes 2,2,12`, fused attention): {span(rows)}. No prediction is too low, because without exact
        records everything that may exist at the same time is added up. The predictions include two things that
        the runs do not have at the peak: a second gradient of the embedding, before it is added to the first one,
        and masks of dropout (2 of the 34 bytes that a block saves per element of its input)."""
    )
    header = "measured, GiB: | predicted, GiB: | difference:"
    table(f"devices | tokens | words | {header}", (cells(row, 2) for row in rows))
    say(
        f"""These are allocated bytes. On 8 devices, with 2048 tokens, PyTorch's allocator had reserved {_reserved()}
        more, which predictions do not include. Keep this memory free (`--headroom`, `--reserve`)."""
    )
    say(
        f"Table 6 of the same paper, under V-Half, where one device has both embedding and head: {span(halves)}. One "
        "row differs by more than 5 %, because the prediction assumes that the head's logits and weight gradient exist "
        "at the same time as all saved tensors."
    )
    table(f"devices | tokens | words | {header}", (cells(row, 2) for row in halves))
    say(
        f"""{ZERO_BUBBLE}, table 4 (`--keep-scores`): {span(zero)}. The paper gives whole GB, read here as 10^9 bytes
        (if it means GiB, all differences are about 7 percentage points lower). It does not give the size of the
        vocabulary, assumed here as 50,304 words. The paper searches ZB-1p under 1F1B's memory limit; here ZB-1p is
        predicted as ZB-H1."""
    )
    table("model | schedule | measured, GB: | predicted, GB: | difference:", (cells(row, 1) for row in zero))


def _reserved() -> str:
    """Return the smallest and largest surplus of reserved over allocated memory."""
    lines = runs.read("gpt-8xa100")
    shares = sorted(float(line["reserved_mib"]) / float(line["allocated_mib"]) - 1 for line in lines)
    return f"{100 * shares[0]:.0f} % to {100 * shares[-1]:.0f} %"


def _formula_times() -> None:
    rows = list(formulas.vocabulary_step_rows())
    print("## Time by formula\n")
    say(
        f"""The same {len(rows)} settings under 1F1B: measured steps follow from the published utilization. One
        number is fitted for each model, on its first row: the rate that a device sustains (`--rate`), which grows
        with the model's width. Difference of the other vocabularies and lengths: {
            span(row for row in rows if abs(row.error) > 1e-9)
        }."""
    )
    table("devices | tokens | words | measured, s: | predicted, s: | difference:", map(cells, rows))


def _golden_memory() -> None:
    state, activations, peaks = (
        list(rows()) for rows in (chips.golden_state_rows, chips.golden_activation_rows, chips.golden_peak_rows)
    )
    pipelined = [row for row in activations if "8 chunks" in row.name[1]]
    print("## Memory of A100, H100 and GB200, by formula\n")
    say(
        f"""Megatron-LM's own reference values: bytes that torch had allocated on the last pipeline rank, between
        steps and at the peak, in GB (10^9 bytes). A parameter has 2 bytes, its gradient 4, and its optimizer
        state 12, divided by the number of replicas. State between steps, where the number of GPUs is published:
        {span(state)}. Predictions are too low, probably because the engine has buffers of its own. For Mixtral
        the number of GPUs is not published, so its predicted peaks include the measured state."""
    )
    header = "model | layout | chip | measured, GB: | predicted, GB: | difference:"
    table(header, (cells(row, 2) for row in state))
    say(
        f"""Predicted bytes of the micro-batches in flight, compared with measured peak minus measured state. With 8
        chunks per device, many micro-batches are in flight: {span(pipelined)}. Mixtral's run on A100 used an
        older release, and needed more memory than the run on H100. The other runs have only one micro-batch in
        flight. Their predictions are too low, because the measured figures include temporary memory of layers,
        which only the predictions of the next table include. Mixtral's layers have kernels that fuse RMS
        normalizations and gated activations."""
    )
    table(header, (cells(row, 2) for row in activations))
    say(f"Peaks, with temporary memory: {span(peaks)}.")
    table(header, (cells(row, 2) for row in peaks))


def _rates() -> None:
    rows = list(rates.rate_rows())
    medians = ", ".join(
        f"{chip}{' with experts' if experts else ''} {rate:.0f}" for (chip, experts), rate in rates.medians().items()
    )
    tuned = [float(row.name[3]) for row in rows if row.name[0] == "H100" and row.name[2] == "DGX Cloud"]
    print("## Rates that were reached\n")
    say(
        f"""For every run of known layout, the table has the rate of a GPU, in TFLOP/s in half precision, with which
        the predicted step time equals the measured one. FLOP are those of the formulas, with attention without a
        causal mask. Bubbles are simulated. All-reduces of tensor parallelism take the time that the cost model
        predicts for the chip's NVLink. Other communication is not predicted, so it lowers the rate. *Others* is
        the median rate of the other runs of the same kind. Each source counts once in this median, with the median
        rate of its runs, because runs of one source have engine and cluster in common. The difference compares
        the step predicted at the rate *others* with the measured step: {span(rows)}. The rates of all runs are
        the defaults of `profile --device estimate:…` (`planner/core/values/sustained.py`), in TFLOP/s: {medians}."""
    )
    say(
        f"""On H100, Megatron-LM tuned by NVIDIA for these models sustains {min(tuned):.0f} to {max(tuned):.0f}
        TFLOP/s. Automodel and runs with deterministic kernels sustain 410 to 455, which the default follows. If
        your engine is tuned, give `--rate 600TFLOP/s`."""
    )
    say(
        """Reasons for differences of more than 15 %: BLOOM's runs with one sample have short kernels. GPT 1T is
        wider than all other models. GPT 7B ran with deterministic kernels and few samples, which matters most on
        GB200. Runs of DGX Cloud on H100 and GB200 are faster than all others. DeepSeek-V3 on 1024 GPUs and Kimi
        K2 exchange tokens of their experts over more nodes than the other models, and Qwen3-30B within one node."""
    )
    table(
        "kind | model | source | reached, TFLOP/s: | others, TFLOP/s: | difference:",
        ([*row.name, percent(row.error)] for row in rows),
    )


def _given_rates() -> None:
    rows = list(rates.given_rate_rows())
    print("## A rate that is given\n")
    say(
        f"""`--rate` is usually the rate of another model or layout with the same engine on the same cluster. Here
        each run is predicted at the median rate of the other runs of its source, chip and kind: {span(rows)}.
        This is the range of a prediction at a given rate. If the rate is that of the same model and layout, with
        other lengths or vocabularies, the range is narrower ([above](#time-by-formula)). BLOOM's runs with one
        sample, models with experts on H100, and the two layouts of GPT 7B on GB200 differ most."""
    )
    table(
        "kind | model | source | reached, TFLOP/s: | same source, TFLOP/s: | difference:",
        ([*row.name, percent(row.error)] for row in rows),
    )


def _other_chips() -> None:
    rows = list(chips.other_chip_rows())
    between = [row for row in rows if "GB200" not in row.name]
    print("## Steps of another chip\n")
    say(
        f"""GPT 7B of Megatron-LM's reference values on one chip, predicted from its rate on another chip. The ratio
        of the two chips follows from the run of the same model in the other layout. A100 and H100:
        {span(between)}; H100 and GB200: {span(row for row in rows if row not in between)}. The step of A100 is 2.561
        times that of H100 in one layout and 2.328 times in the other. The ratio of these numbers is 1.10008, which
        the table rounds to +10.0 %."""
    )
    table("layout | from | to | measured, s: | predicted, s: | difference:", map(cells, rows))


def _left_out() -> None:
    print("## Published figures that were not used\n")
    for text in (
        """torchtitan's tables have 1F1B and interleaved 1F1B of a 405B model on 512 H100, but neither the micro-batch
        size nor the number of chunks. Its runs of 8B and 70B models are on H100 with 500 W and 2.4 TB/s, which are
        other chips than those of the data sheet.""",
        """Steps of Mixtral among Megatron-LM's reference values: the number of GPUs is not published. With the same
        layout on both chips, 8x7B with EP 4 takes 22.2 s on A100 and 8.9 s on H100. 8x7B with EP 8 takes 3.7 s and
        3.3 s, and 8x22B takes 6.9 s on both. So the last two models are not limited by compute, or they ran on
        different numbers of GPUs.""",
        """Megatron-Bridge's tables on H100 are in 8-bit precision, except for GPT-OSS 120B, which was not
        predicted.""",
        """Two log lines of DGX Cloud show memory, but neither the bytes of a gradient nor buffers. If gradients have 2
        bytes, the formulas give 0.2 % less state for Llama 3 8B (TP 1, 8 GPUs) and 0.8 % less for Nemotron-4 15B (TP 2,
        64 GPUs), and peaks that are 6 % and 11 % lower.""",
        """Memory of BLOOM's runs: it is not published which memory they count besides tensors. Formulas give 14 % to
        31 % less.""",
        f"""Megatron-LM's scaling tables ({MEGATRON}): one plan for each model, so no plan can be predicted from another
        one. Their formulas are those of `profile --from-formula`.""",
        """Memory of the runs on GH200: all runs have the same cut, and neither the engine's bytes per parameter nor the
        memory of kernels is published.""",
        """Sailor's runs in micro-batches of one sample: predictions are 20 to 31 % off, because kernel launches limit
        such short layers, so times of single layers do not add up. Plans that mix kinds of devices: up to 49 % off.
        No table here includes these runs.""",
        """Profiles of PipeDream and DAPPLE: plans with data parallelism in some stages only, asynchronous updates, or
        no iteration measured.""",
        """The GPipe paper's rows with M = 1 and 4: batch sizes differ between rows, and are not published.""",
    ):
        say(text, first="- ", rest="  ")


if __name__ == "__main__":
    main()
