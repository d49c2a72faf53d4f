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
        """Made by `python -m benchmarks.published`. Nothing here was run by us: figures are those that others
        published, retyped with their sources in
        [benchmarks/data/published](../../benchmarks/data/published/README.md); predictions are those of the laws
        that `solve` and `check` use ([cost model](../cost-model.md)), from profiles written by hand out of the
        same publications. *Difference* is predicted against measured: + is too slow, or too much memory (of
        throughput: too fast). Rows that miss are here, too, and each section says why they do.
        `tests/unit/test_published.py` holds every table to what came out."""
    )
    for section in (
        _a100,
        _forecasts,
        _gh200,
        _halves,
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
        f"""A GPT of 32 layers, 1F1B, 128 micro-batches of one sample of 2048 tokens ({VOCABULARY},
        artifact). The profile has one layer per stage, with the forward and backward that the run itself recorded
        for it. Difference: {span(rows)}. What is not predicted is what the record does not have: transfers, the
        optimizer's step, the gradients' norm."""
    )
    table("words | cut | measured, s: | predicted, s: | difference:", map(cells, rows))


def _forecasts() -> None:
    rows, cuts = list(runs.forecast_rows()), list(runs.cut_rows())
    print("## One plan from another plan's times\n")
    say(
        f"""The authors moved layers off the last stage by hand. Its iteration as forecast from the times of the even
        plan alone: a block is a quarter of the mean middle stage, what else the first and last stage take is
        embedding and head. Difference: {span(rows)}. With 64k words the forecast is too fast, as the stage of
        five blocks took 3.9 % longer than five quarters of one with four. Whoever expected the even plan's
        iteration again would have been off by up to {percent(_largest_change(rows))}."""
    )
    table("words | measured, s: | forecast, s: | difference:", map(cells, rows))
    say(
        f"""The best cut by `gpipe-plan solve` of the same layers, under the same schedule and without caps, beside
        the one made by hand, both predicted: up to {100 * max(c.gain for c in cuts):.1f} % shorter, never longer.
        The first stage has the embedding, the last one the head."""
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
        f"""Layer times, plans and iterations of Sailor (SOSP 2025), micro-batches of 8 samples, 1F1B on two stages of
        12 and 14 layers, tensor parallel 4 within each stage, replicas side by side whose sum of gradients took
        what the record says. One number is fitted, on {fitted.name[0]}: a crossing keeps a stage busy for
        {runs.gh200_crossing_us() / 1e3:.2f} ms. The others: {span(rows)}."""
    )
    table("plan | replicas | M | measured, s: | predicted, s: | difference:", map(cells, (fitted, *rows)))


def _halves() -> None:
    searched = list(runs.searched_rows())
    rows = sorted([*runs.zero_bubble_rows(), *searched], key=lambda row: [_number(text) for text in row.name[:2]])
    fitted: dict[str, list[Row]] = {}
    lines = []
    for model in dict.fromkeys(row.name[0] for row in rows):
        of_model = [row for row in rows if row.name[0] == model]
        for row, again in zip(of_model, runs.scaled(of_model, of_model[0]), strict=True):
            fitted.setdefault(row.name[2], []).append(again)
            lines.append([*cells(row), percent(again.error)])
    print("## Schedules with backwards in halves, on A100\n")
    say(
        f"""GPTs of 1.5 to 28 billion parameters, with F, I, W and transfers as profiled ({ZERO_BUBBLE}); steps follow
        from the measured samples per GPU and second, which have two or three digits. With nothing fitted
        predictions are too fast, {span(rows)}: the paper has one time for all stages, where the slowest one
        counts, and none of the optimizer. *Fitted* takes from the 1F1B row with the smallest M of each model how
        much longer computing takes; then 1F1B is at {span(fitted["1f1b"])}, ZB-1p (here as ZB-H1, whose bubbles
        are the same in the paper) at {span(fitted["zb1p"])}, ZB-2p (here `--schedule search` where each device
        may hold 2·K micro-batches) at {span(fitted["zb2p"])} (theirs need not wait for each other in the
        optimizer's step, which is worth 8 % to them), interleaved 1F1B at {span(fitted["interleaved"])}. Of
        interleaved 1F1B every layer is a chunk, and Megatron-LM's stages wait for its transfers, where the link
        here overlaps: do not choose interleaving over halves for a few percent."""
    )
    table("model | M | schedule | measured, s: | predicted, s: | difference: | fitted:", lines)


def _number(text: str) -> float:
    return float(text.removesuffix("B"))


def _recomputation() -> None:
    rows, forecasts = list(runs.recomputation_rows()), list(formulas.recomputation_forecast_rows())
    print("## Recomputation, on A100\n")
    say(
        f"""Megatron-LM with tensor parallel 8 ({RECOMPUTATION}, tables 4 and 5). The law of recomputation, 2 F + B,
        against the measured layer in ms; and the 22B model, which is no pipeline, from its layers, in s. The
        second row misses embedding, head, loss and optimizer, which the record does not time; the third takes
        them from the second. Selective recomputation within a layer is not planned here: such a layer is taken as
        it was measured."""
    )
    table("what | measured: | predicted: | difference:", map(cells, rows))
    say(
        f"""Pipelines of 8, 35 and 64 stages: iterations with everything recomputed, forecast by formula from those
        without (selective, with sequence parallelism), which tell the rate that a device sustains. Difference:
        {span(forecasts)}."""
    )
    table("model | sustained, TFLOP/s | measured, s: | forecast, s: | difference:", map(cells, forecasts))


def _even_stages() -> None:
    rows = list(runs.even_stage_rows())
    transformers = [row for row in rows if row.name[1].startswith("Transformer")]
    rest = [row for row in rows if row not in transformers]
    print("## Throughput over the number of devices\n")
    say(
        f"""GPipe with everything recomputed ({GPIPE}, tables 2 and 3): how many times as fast as on
        two devices. No layer times were published,
        so stages are taken to be even. Transformers, whose stages can be: {span(transformers)}.
        AmoebaNet: {span(rest)}, too fast: its layers differ, so its stages do (the paper says so as well), and on
        P100 every transfer goes through the host."""
    )
    table("source | model | from K | to K | M | measured: | predicted: | difference:", (cells(row, 2) for row in rows))


def _memory() -> None:
    rows, halves = (list(formulas.vocabulary_memory_rows(name)) for name in ("1f1b", "v-half"))
    zero = list(formulas.zero_bubble_memory_rows())
    print("## Memory by formula\n")
    say(
        f"""Peaks of the fullest device, from profiles of `gpipe-plan profile --from-formula transformer`: no number
        of the runs is in them. {len(rows)} settings of {VOCABULARY}, table 5, "baseline" under 1F1B (`--dtype
        bf16 --state-bytes 2,2,12`, attention fused): {span(rows)}. No row is too low, as without exact records
        all that may be there at once is added up. In the excess are the gradient of the embedding, once more
        before it is added to earlier ones (when it is there, its micro-batch's activations have gone), and masks
        of dropout, 2 of 34sbh, which these runs did without."""
    )
    header = "measured, GiB: | predicted, GiB: | difference:"
    table(f"devices | tokens | words | {header}", (cells(row, 2) for row in rows))
    say(
        f"""These are bytes that were allocated. On 8 devices, with 2048 tokens, PyTorch's allocator had reserved
        {_reserved()} more, which no prediction has: leave it free (`--headroom`, `--reserve`)."""
    )
    say(
        f"The same paper's table 6 under V-Half, where one device has both embedding and head: {span(halves)}. "
        "The row above 5 % has the head's logits and its weight's gradient on top of all that is kept: a bound, too."
    )
    table(f"devices | tokens | words | {header}", (cells(row, 2) for row in halves))
    say(
        f"""{ZERO_BUBBLE}, table 4 (`--keep-scores`): {span(zero)}. The paper gives whole GB, taken for 10^9 bytes
        here (if they are GiB, predictions are 7 % lower), and no size of the vocabulary, taken for 50,304 words.
        ZB-1p is searched for under 1F1B's limit; here it is ZB-H1."""
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
        f"""The same {len(rows)} settings under 1F1B: iterations as their utilisation tells them, and as the formulas
        do. One number is fitted for each model, on its first row: the rate that a device sustains (`--rate`),
        which grows with the model's width. The other vocabularies and lengths:
        {span(row for row in rows if abs(row.error) > 1e-9)}."""
    )
    table("devices | tokens | words | measured, s: | predicted, s: | difference:", map(cells, rows))


def _golden_memory() -> None:
    state, activations, peaks = (
        list(rows()) for rows in (chips.golden_state_rows, chips.golden_activation_rows, chips.golden_peak_rows)
    )
    pipelined = [row for row in activations if "8 chunks" in row.name[1]]
    print("## Memory of A100, H100 and GB200, by formula\n")
    say(
        f"""Megatron-LM's own reference values: bytes that torch had allocated on the last pipeline rank, between steps
        and at the peak, in GB (10^9 bytes). Parameters have 2 bytes, gradients 4, and the optimizer's 12 are divided
        by the replicas. State, where the number of GPUs is stated: {span(state)}. What is missing are probably
        buffers of the engine. It is not stated for Mixtral, whose peaks here take the state as measured."""
    )
    header = "model | layout | chip | measured, GB: | predicted, GB: | difference:"
    table(header, (cells(row, 2) for row in state))
    say(
        f"""Predicted bytes of the micro-batches in flight, beside measured peak minus measured state. With 8 chunks
        per device, where many micro-batches are in flight: {span(pipelined)}. Mixtral's run on A100, of an older
        release, needed more than the one on H100. The others are too low, because the peak of one micro-batch in
        flight has the transients of its layers as well, which the next table includes. Layers of Mixtral have kernels
        that fuse RMS normalizations and gated activations."""
    )
    table(header, (cells(row, 2) for row in activations))
    say(f"Peaks, with transients: {span(peaks)}.")
    table(header, (cells(row, 2) for row in peaks))


def _rates() -> None:
    rows = list(rates.rate_rows())
    medians = ", ".join(
        f"{chip}{' with experts' if experts else ''} {rate:.0f}" for (chip, experts), rate in rates.medians().items()
    )
    tuned = [float(row.name[3]) for row in rows if row.name[0] == "H100" and row.name[2] == "DGX Cloud"]
    print("## Rates that were reached\n")
    say(
        f"""The TFLOP/s of a GPU in half precision at which the predicted step takes as long as the measured one, for
        every run of known layout. FLOP are those of the formulas, attention without a causal mask. Bubbles are
        simulated, and sums of GPUs that share each layer take what the cost model says for the chip's NVLink. Other
        communication lowers the rate. *Others* is the rate of the other runs of the same kind: the median of their
        sources' medians, because runs of one source have engine and cluster in common. The difference is that of a
        step predicted with it: {span(rows)}. The rates of all runs are the defaults of `profile --device estimate:…`
        (`planner/core/values/sustained.py`), in TFLOP/s: {medians}."""
    )
    say(
        f"""On H100, Megatron-LM as NVIDIA tuned it for these models reaches {min(tuned):.0f} to {max(tuned):.0f}
        TFLOP/s, Automodel and runs with deterministic kernels 410 to 455. The default is that of the latter: if you
        have the former, give `--rate 600TFLOP/s`."""
    )
    say(
        """Where a prediction misses by more than 15 %: BLOOM's runs with one sample have short kernels. GPT 1T is wider
        than all other models. GPT 7B ran with deterministic kernels and few samples, which matters most on GB200. Runs
        of DGX Cloud on H100 and GB200 are faster than all others. DeepSeek-V3 on 1024 GPUs and Kimi K2 exchange tokens
        of their experts over more nodes, and Qwen3-30B over none."""
    )
    table(
        "kind | model | source | reached, TFLOP/s: | others, TFLOP/s: | difference:",
        ([*row.name, percent(row.error)] for row in rows),
    )


def _given_rates() -> None:
    rows = list(rates.given_rate_rows())
    print("## A rate that is given\n")
    say(
        f"""`--rate` is usually what another model or layout reached with the same engine on the same cluster. Here
        each run is predicted at the median of the other runs of its source, chip and kind: {span(rows)}. This is the
        range of a prediction at a given rate. If the rate is that of the same model and layout, with other lengths or
        vocabularies, the range is narrower ([above](#time-by-formula)). BLOOM's runs with one sample, models with
        experts on H100, and the two layouts of GPT 7B on GB200 differ most."""
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
        f"""GPT 7B of Megatron-LM's reference values on one chip, from its rate on another one. How many times as fast
        the chip is follows from the run of the same model in the other layout. A100 and H100: {span(between)};
        H100 and GB200: {span(row for row in rows if row not in between)}."""
    )
    table("layout | from | to | measured, s: | predicted, s: | difference:", map(cells, rows))


def _left_out() -> None:
    print("## What has too little in it\n")
    for text in (
        """torchtitan's tables have 1F1B and interleaved 1F1B of a 405B model on 512 H100, but neither the micro-batch
        size nor the number of chunks. Its runs of 8B and 70B models are on H100 with 500 W and 2.4 TB/s, which are
        other chips than those of the data sheet.""",
        """Steps of Mixtral among Megatron-LM's reference values: the number of GPUs is not stated. Of the same layout,
        8x22B takes 6.9 s on both A100 and H100, 8x7B with EP 8 3.7 s and 3.3 s, and with EP 4 22.2 s and 8.9 s. So
        the first two are not bound by computing, or ran on different numbers of GPUs.""",
        """Megatron-Bridge's tables on H100 are in 8-bit precision, except for GPT-OSS 120B, whose windows of attention
        no formula here has.""",
        """Two log lines of DGX Cloud show memory, but neither the bytes of a gradient nor buffers. If gradients have 2
        bytes, the formulas give 0.2 % less state for Llama 3 8B (TP 1, 8 GPUs) and 0.8 % less for Nemotron-4 15B (TP 2,
        64 GPUs), and peaks that are 6 % and 11 % lower.""",
        """Memory of BLOOM's runs: not compared, because it is not stated what they count besides tensors. Formulas give
        14 % to 31 % less.""",
        f"""Megatron-LM's scaling tables ({MEGATRON}): one plan for each model, so that there is nothing to forecast.
        Its formulas are those of `profile --from-formula`.""",
        """Memory of the runs on GH200: all are of one cut, and neither what the engine holds of a parameter nor what
        kernels take is told.""",
        """Sailor's runs in micro-batches of one sample: 20 to 31 % off when layers are added up, as the launching of
        kernels bounds layers that short (do not time them one by one). Its plans that mix kinds of devices: up to
        49 % off. No table here has either.""",
        """Profiles of PipeDream and DAPPLE: plans with data parallelism in some stages only, asynchronous updates, or
        no iteration measured.""",
        """The GPipe paper's rows with M = 1 and 4: batch sizes changed from row to row to fit memory, and are not
        told.""",
    ):
        say(text, first="- ", rest="  ")


if __name__ == "__main__":
    main()
