"""Schedules with split backwards: completeness, no deadlocks, and bubbles and memory of their papers."""

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, product, takewhile

import pytest

from planner.core.cost.simulate import StageTimes, simulate
from planner.core.errors import UsageError
from planner.core.schedule import (
    SCHEDULES,
    SPLITTING,
    Action,
    ComputeTimeBounds,
    instruction_lists,
)
from tests.support.house import ROOT

NAMES = [schedule.name for schedule in SPLITTING]
EVEN = (1.0, 1.0, 1.0)
"""F = I = W."""


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Yield the K, M and V that a schedule supports."""
    schedule = SCHEDULES[name]
    for num_devices, micro_batches, chunks in product(
        (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 6, 8, 13, 16, 24), (1, 2, 3)
    ):
        try:
            schedule.check_supported(num_devices, micro_batches, chunks)
        except UsageError:
            continue
        yield num_devices, micro_batches, chunks


def chunks_of(name: str) -> int:
    """Return 2 for schedules with several chunks, else 1."""
    return 2 if SCHEDULES[name].is_chunked else 1


def as_text(row: Sequence[Action]) -> str:
    """Return a text such as `0F0 0F1 0I0 0W0`."""
    return " ".join(map(str, row))


def holds(row: Sequence[Action], *, until: str) -> list[int]:
    """Return the forwards that a device holds after each action, until their W or I; B is both."""
    ends = ("B", until)
    return list(accumulate((action.kind == "F") - (action.kind in ends) for action in row))


def idle(
    name: str,
    num_devices: int,
    micro_batches: int,
    times: tuple[float, float, float],
    *,
    send: float = 0.0,
    chunks: int | None = None,
) -> float:
    """Return the idle time as in the papers: the longest span of a device from first F to last W, less its work."""
    chunks = chunks or chunks_of(name)
    forward, input_backward, weight_backward = (time / chunks for time in times)
    stage = StageTimes(
        forward_us=forward,
        backward_us=input_backward + weight_backward,
        last_backward_us=input_backward + weight_backward,
        input_backward_us=input_backward,
        last_input_backward_us=input_backward,
        weight_backward_us=weight_backward,
        send_us=send,
    )
    rows = SCHEDULES[name].actions(num_devices, micro_batches, chunks)
    spans = {device: (float("inf"), 0.0) for device in range(num_devices)}
    for event in simulate(rows, [stage] * (num_devices * chunks)):
        if not event.kind.startswith("send"):
            first, last = spans[event.device]
            spans[event.device] = min(first, event.start_us), max(last, event.end_us)
    return max(last - first for first, last in spans.values()) - micro_batches * sum(times)


@pytest.mark.parametrize("name", NAMES)
def test_action_orders_equal_the_docstrings(name: str) -> None:
    schedule = type(SCHEDULES[name])
    text = f"{inspect.getdoc(schedule)}\n{inspect.getdoc(inspect.getmodule(schedule))}"
    drawn = re.findall(r"(?m)^ *device \d: (.*)$", text)
    micro_batches = int(re.findall(r"M = (\d+)", text)[0])
    rows = SCHEDULES[name].actions(len(drawn), micro_batches, chunks_of(name))
    assert [as_text(row) for row in rows] == drawn


@pytest.mark.parametrize("name", NAMES)
def test_only_dualpipev_has_whole_backwards(name: str) -> None:
    kinds = Counter(action.kind for row in SCHEDULES[name].actions(4, 8, chunks_of(name)) for action in row)
    assert set(kinds) == (set("FBIW") if name == "dualpipev" else set("FIW"))


@pytest.mark.parametrize("name", ["interleaved", *NAMES])
def test_pairs_of_devices_have_the_same_order_of_transfers(name: str) -> None:
    for num_devices, micro_batches, chunks in sizes(name):
        schedule = SCHEDULES[name]
        rows = instruction_lists(schedule.actions(num_devices, micro_batches, chunks))
        device_of = {s: d for d in range(num_devices) for s in schedule.stages_on(d, num_devices, chunks)}
        pairs: dict[tuple[frozenset[int], int], list[tuple[str, int, int]]] = {}
        for device, row in enumerate(rows):
            received = set()
            for what in row:
                back = 1 if what.kind == "F" else -1
                begins = what.stage - back
                if what.do == "run":
                    is_sent = what.kind != "W" and device_of.get(begins, device) != device
                    assert not is_sent or (back, what.stage, what.micro_batch) in received
                    continue
                sender = begins if what.do == "receive" else what.stage
                if what.do == "receive":
                    received.add((back, what.stage, what.micro_batch))
                both = frozenset((device_of[sender], device_of[sender + back]))
                pairs.setdefault((both, device), []).append((what.kind, sender, what.micro_batch))
        for (both, device), transfers in pairs.items():
            (other,) = both - {device}
            assert transfers == pairs[both, other]


PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0576, 0.0266)),
]
"""arXiv:2401.10241, tables 6 and 5: K, M; F, I, W and a transfer in ms; bubbles of 1F1B, ZB-H1, ZB-H2."""


@pytest.mark.parametrize(("num_devices", "micro_batches", "times", "send", "bubbles"), PUBLISHED)
def test_bubbles_equal_the_published_ones(num_devices, micro_batches, times, send, bubbles):
    ideal = micro_batches * sum(times)
    wastes = [idle(name, num_devices, micro_batches, times, send=send) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert tuple(round(waste / (ideal + waste), 4) for waste in wastes) == bubbles


@pytest.mark.parametrize(
    "times", [EVEN, (18.5, 18.0, 9.25), (29.75, 29.5, 19.75), (2.0, 3.0, 1.0), (3.0, 2.0, 2.0), (3.0, 2.0, 0.0)]
)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8])
def test_bubbles_of_zero_bubble_equal_the_formulas(num_devices: int, times: tuple[float, float, float]) -> None:
    """The formulas hold if W is at most F and I, M is at least 2K, and there are no transfers."""
    forward, input_backward, weight_backward = times
    both, gaps = forward + input_backward, num_devices - 1
    for micro_batches in (2 * num_devices, 3 * num_devices):
        names = ("gpipe", "1f1b", "zb-h1", "zb-h2")
        measured = {name: idle(name, num_devices, micro_batches, times) for name in names}
        assert measured["gpipe"] == pytest.approx(gaps * (both + weight_backward))
        assert measured["1f1b"] == pytest.approx(gaps * (both + weight_backward))
        assert measured["zb-h1"] == pytest.approx(gaps * (both - weight_backward))
        assert measured["zb-h2"] == pytest.approx(gaps * (both - 2 * weight_backward))
        interleaved = idle("interleaved-zb", num_devices, micro_batches, times)
        assert interleaved == pytest.approx(gaps * (both - weight_backward) / 2)
        thrice = idle("interleaved-zb", num_devices, micro_batches, times, chunks=3)
        assert thrice == pytest.approx(gaps * (both - weight_backward) / 3)
        assert gaps * (both - 2 * weight_backward) / 2 <= idle("zbv", num_devices, micro_batches, times) + 1e-9
        if input_backward <= forward <= input_backward + weight_backward:
            assert idle("dualpipev", num_devices, micro_batches, times) == pytest.approx(interleaved)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8, 16])
def test_bubbles_of_v_schedules_with_even_stages(num_devices: int) -> None:
    """With F = I = W, ZB-V has no bubble from M = 2K-1; V-Half has half and V-Min two thirds of that of 1F1B."""
    for micro_batches in (num_devices, 2 * num_devices, 3 * num_devices):
        of_1f1b = idle("1f1b", num_devices, micro_batches, EVEN)
        assert of_1f1b == pytest.approx(3 * (num_devices - 1))
        assert idle("v-half", num_devices, micro_batches, EVEN) <= of_1f1b / 2 + 1e-9
        assert idle("v-min", num_devices, micro_batches, EVEN) <= of_1f1b * 2 / 3 + 1e-9
    assert idle("zbv", num_devices, 2 * num_devices, EVEN) == pytest.approx(0.0, abs=1e-9)
    assert idle("zbv", num_devices, max(1, 2 * num_devices - 1), EVEN) == pytest.approx(0.0, abs=1e-9)


def test_uneven_split_backwards_slow_v_min_per_micro_batch_and_v_half_once() -> None:
    """V-Half repeats without gaps if W + 2I >= 2F and W + 2F >= 2I, as its paper says; V-Min if F = I = W."""
    for times in [(18.5, 18.0, 9.25), (2.0, 2.5, 1.0), (2.5, 2.0, 1.0), (1.0, 1.0, 2.0)]:
        for num_devices in (2, 3, 4, 5, 7, 8):
            half, later = (idle("v-half", num_devices, micro_batches, times) for micro_batches in (32, 64))
            assert later == pytest.approx(half)
    v_min, v_min_later = (idle("v-min", 8, micro_batches, (18.5, 18.0, 9.25)) for micro_batches in (32, 64))
    assert v_min_later > v_min + 32 * 3


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.366, 0.432, 1.0])
def test_memory_of_zero_bubble_equals_its_paper(num_devices: int, share: float) -> None:
    """Stage i, from 1, of ZB-H1: (K-i+1) M_B + (i-1) M_W; of ZB-H2: (2K-2i+1) M_B + (2i-2) M_W. M_W = share M_B."""
    for name, kept, late in [("zb-h1", num_devices, 1), ("zb-h2", 2 * num_devices - 1, 2)]:
        for micro_batches in (2 * num_devices, 4 * num_devices):
            for stage, row in enumerate(SCHEDULES[name].actions(num_devices, micro_batches)):
                both = zip(holds(row, until="I"), holds(row, until="W"), strict=True)
                peak = max(before + share * (all_held - before) for before, all_held in both)
                assert peak == pytest.approx(kept - late * stage + share * late * stage)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 8, 16])
def test_memory_of_v_schedules_equals_their_paper(num_devices: int) -> None:
    """In forwards of a stage, two to a micro-batch, until their W: a half and a third of 1F1B's, which is 2K."""
    most = {
        "zbv": 2 * num_devices,
        "v-half": 2 * ((num_devices + 2) // 2),
        "v-min": 2 * ((num_devices + 4) // 3),
        "dualpipev": 2 * num_devices + 1,
    }
    for name, held in most.items():
        for micro_batches in (2 * num_devices, 3 * num_devices, 4 * num_devices):
            peaks = [max(holds(row, until="W")) for row in SCHEDULES[name].actions(num_devices, micro_batches, 2)]
            assert set(peaks) == {held}, (name, micro_batches)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_micro_batches_need_no_more_memory(name: str) -> None:
    """Rounds of the interleaved schedule may be longer than K."""
    for num_devices, micro_batches, chunks in sizes(name):
        rows = SCHEDULES[name].actions(num_devices, micro_batches, chunks)
        enough = SCHEDULES[name].actions(num_devices, 4 * num_devices, chunks)
        longer = micro_batches // max(1, micro_batches // num_devices) - num_devices if name == "interleaved-zb" else 0
        most = max(max(holds(row, until="W")) for row in enough) + max(0, (chunks - 1) * longer)
        assert max(max(holds(row, until="W")) for row in rows) <= min(most, chunks * micro_batches)


def test_interleaved_zero_bubble_holds_one_micro_batch_per_device() -> None:
    for num_devices, chunks in product((1, 2, 3, 4, 8), (1, 2, 3, 4)):
        rows = SCHEDULES["interleaved-zb"].actions(num_devices, 4 * num_devices, chunks)
        assert {max(holds(row, until="W")) for row in rows} == {num_devices * chunks}


def documented() -> list[list[str]]:
    """Return the rows of the table of figures in docs/schedules.md."""
    lines = (ROOT / "docs/schedules.md").read_text(encoding="utf-8").splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| schedule | bubble, even"))
    rows = takewhile(lambda line: line.startswith("| `"), lines[begin + 2 :])
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows]


@pytest.mark.parametrize("row", documented(), ids=lambda row: row[0])
def test_figures_in_the_documentation_equal_the_simulation(row: list[str]) -> None:
    name, *bubbles, held = row
    measured = []
    for times, send in [(EVEN, 0.0), *((times, send) for k, m, times, send, _ in PUBLISHED if (k, m) == (8, 32))]:
        waste = idle(name, 8, 32, times, send=send)
        measured.append(f"{waste / (32 * sum(times) + waste):.4f}")
    assert measured == bubbles
    rows = SCHEDULES[name].actions(8, 32, chunks_of(name))
    assert max(max(holds(row, until="W")) for row in rows) / chunks_of(name) == float(held)


def test_documentation_lists_all_schedules() -> None:
    assert [row[0] for row in documented()] == list(SCHEDULES)


@pytest.mark.parametrize(("num_devices", "chunks"), [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_interleaved_bubble_and_memory_equal_the_documentation(num_devices: int, chunks: int) -> None:
    """(K-1)(F+B)/V idle, and K + (K-1)/V micro-batches on the first device."""
    rows = SCHEDULES["interleaved"].actions(num_devices, 4 * num_devices, chunks)
    assert max(max(holds(row, until="W")) for row in rows) == chunks * num_devices + num_devices - 1
    waste = idle("interleaved", num_devices, 4 * num_devices, (2.0, 3.0, 1.0), chunks=chunks)
    assert waste == pytest.approx((num_devices - 1) * 6.0 / chunks)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_number_of_transfers_equals_the_documentation(name: str, num_devices: int) -> None:
    """Each direction has K-1 with one stage per device, VK-1 in a loop, 2(K-1) in a V."""
    chunks = chunks_of(name)
    crossed = num_devices * chunks - 1 if SCHEDULES[name].placement == "loop" else 2 * (num_devices - 1)
    rows = instruction_lists(SCHEDULES[name].actions(num_devices, 8, chunks))
    sent = sum(what.do == "send" for row in rows for what in row)
    assert sent == (2 * 8 * crossed if num_devices > 1 else 0)


@pytest.mark.parametrize("name", NAMES)
def test_schedule_bound_is_at_most_the_step(name: str) -> None:
    schedule, chunks = SCHEDULES[name], chunks_of(name)
    stage = StageTimes(
        forward_us=1.0,
        backward_us=2.0,
        last_backward_us=2.0,
        input_backward_us=1.0,
        last_input_backward_us=1.0,
        weight_backward_us=1.0,
    )
    for num_devices, micro_batches, _ in (size for size in sizes(name) if size[2] == chunks):
        num_stages = num_devices * chunks
        step = max(
            e.end_us for e in simulate(schedule.actions(num_devices, micro_batches, chunks), [stage] * num_stages)
        )
        bounds = ComputeTimeBounds(work_us=3.0 * num_stages, forward_us=1.0, backward_us=2.0, pair_us=3.0 * chunks)
        bound = schedule.bound_us(bounds, micro_batches, chunks)
        assert 3.0 * chunks * micro_batches <= bound <= step


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("zb-h1", (4, 8, 2), "zb-h1 runs one stage on each device, got 2 chunks"),
        ("zb-h2", (4, 8, 2), "zb-h2 runs one stage on each device, got 2 chunks"),
        ("zbv", (4, 8, 1), "zbv runs 2 stages on each device, got 1"),
        ("v-half", (4, 8, 3), "v-half runs 2 stages on each device, got 3"),
        ("dualpipev", (4, 7, 2), "DualPipeV needs at least as many micro-batches as stages, got M = 7, 8 stages"),
        ("interleaved-zb", (4, 9, 2), "interleaved zero bubble runs the micro-batches in M // K = 2 rounds"),
    ],
)
def test_unsupported_sizes_are_refused(name: str, size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        SCHEDULES[name].actions(*size)
    assert refused.value.message.startswith(message)
    assert refused.value.hint.startswith("use ")


def test_most_devices_of_dualpipev_is_exact() -> None:
    for micro_batches in range(2, 30):
        most = int(SCHEDULES["dualpipev"].most_devices(micro_batches))
        SCHEDULES["dualpipev"].check_supported(most, micro_batches, 2)
        with pytest.raises(UsageError):
            SCHEDULES["dualpipev"].check_supported(most + 1, micro_batches, 2)
