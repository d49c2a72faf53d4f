"""Peak memory of a stage: examples worked out by hand, and properties of any chain."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import peak_bytes_of_stages, stage_memory
from planner.core.cost.stages import stage_memory_table
from planner.core.values.plan import Recompute, StageMemory
from planner.core.values.profile import BoundaryTensor
from tests.support.chains import chain, layer, random_profile, record, tensor
from tests.support.peak_points import peak_points_with

CHOICES: tuple[Recompute, ...] = ("never", "except-last", "always")


def memory_of(
    costs: ChainCosts, first: int, end: int, *, m: int, recompute: Recompute = "never", in_flight: int | None = None
) -> StageMemory:
    """Return the memory under GPipe, unless fewer micro-batches are in flight."""
    return stage_memory(costs, first, end, peak_points_with(m, in_flight), recompute=recompute)


def additive() -> ChainCosts:
    """Return four layers without exact records, whose outputs are part of the saved bytes."""
    layers = [
        layer(
            f"layers.{n}",
            parameter_bytes=100 * (n + 1),
            optimizer_bytes=200 * (n + 1),
            buffer_bytes=n,
            output_bytes=10 * (n + 1),
            saved_bytes=50 + 10 * n,
            forward_peak_bytes=5 + n,
            backward_peak_bytes=15 + n,
        )
        for n in range(4)
    ]
    return costs_at(chain(*layers), 1)


def exact() -> ChainCosts:
    """Return three layers with records that save their inputs.

    Boundaries: 8, 16, 32 and 4 bytes (the loss), targets of 2. Saved: 10 + 16, 20 + 32, 30; no layer saves the last 4
    bytes. Only the next layer saves what a stage sends, so in the stage's own backward only the engine holds it.
    """
    crossing = (8, 16, 32, 4)
    peaks = ((40, 25, 70, 60), (60, 45, 120, 100), (50, 35, 90, 80))
    layers = [
        layer(
            f"layers.{n}",
            parameter_bytes=(5, 7, 11)[n],
            optimizer_bytes=(10, 14, 22)[n],
            optimizer_peak_bytes=1,
            detail=record(
                internal=10 * (n + 1),
                given=[tensor(crossing[n], kept=True)],
                made=[tensor(crossing[n + 1])],
                forward=peaks[n][0],
                no_grad=peaks[n][1],
                first_backward=peaks[n][2],
                backward=peaks[n][3],
                target=2 if n == 2 else 0,
            ),
        )
        for n in range(3)
    ]
    return costs_at(chain(*layers), 1)


# ---- the additive form: everything held at once and the largest transient


@pytest.mark.parametrize(
    ("first", "end", "m", "recompute", "in_flight", "transfer", "working"),
    [
        # A waiting micro-batch holds its received input and what was saved; transfer: gradients out and in.
        (1, 3, 4, "never", 4 * (10 + 130), 30 + 10, 17),
        (0, 2, 4, "never", 4 * 110, 20, 16),
        (2, 4, 4, "never", 4 * (20 + 150), 20, 18),
        (0, 4, 4, "never", 4 * 260, 0, 18),
        (1, 3, 1, "never", 140, 40, 17),
        # Recomputed: input and output wait, one micro-batch's saved bytes are there again.
        (1, 3, 4, "always", 4 * (10 + 30), 40, 130 + 17),
        (0, 2, 4, "always", 4 * 20, 20, 110 + 16),
        (2, 4, 4, "always", 4 * (20 + 40), 20, 150 + 18),
        (1, 3, 1, "always", 40, 40, 130 + 17),
        # All but the last: that one kept 140 instead of 40.
        (1, 3, 4, "except-last", 4 * 40 + 100, 40, 130 + 17),
        (0, 2, 2, "except-last", 2 * 20 + 90, 20, 110 + 16),
        (2, 4, 2, "except-last", 2 * 60 + 110, 20, 150 + 18),
        # The only micro-batch is the last: nothing is recomputed.
        (1, 3, 1, "except-last", 140, 40, 17),
    ],
)
def test_memory_under_gpipe_by_hand(  # noqa: PLR0917 - one row of the table
    first: int, end: int, m: int, recompute: Recompute, in_flight: int, transfer: int, working: int
) -> None:
    parameters = sum(100 * (n + 1) for n in range(first, end))
    expected = StageMemory.of(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters,
        buffers=sum(range(first, end)),
        in_flight=in_flight,
        transfer=transfer,
        working=working,
        reserve=0,
    )
    assert memory_of(additive(), first, end, m=m, recompute=recompute) == expected


@pytest.mark.parametrize(
    ("waiting", "recompute", "in_flight", "working"),
    [
        (3, "never", 3 * 140 + 10, 17),
        (2, "never", 2 * 140 + 10, 17),
        (1, "never", 140 + 10, 17),
        (3, "always", 3 * 40 + 10, 147),
        (1, "always", 40 + 10, 147),
        # The last one, which keeps 100 more, waits when no input comes any more.
        (3, "except-last", 3 * 40 + 100, 147),
        (1, "except-last", 40 + 10, 147),
    ],
)
def test_memory_under_1f1b_by_hand(waiting: int, recompute: Recompute, in_flight: int, working: int) -> None:
    """Each following stage keeps one micro-batch waiting.

    The next input (10, received early) and the last sent input gradient are held too.
    """
    memory = memory_of(additive(), 1, 3, m=8, recompute=recompute, in_flight=waiting)
    assert (memory.in_flight, memory.transfer, memory.working) == (in_flight, 40 + 10, working)
    assert memory.total == 500 + 500 + 1000 + 3 + in_flight + 50 + working


def test_unsaved_output_is_held_at_the_end_of_a_stage() -> None:
    """A layer saves 4 of its 10 output bytes. A stage that ends there holds the other 6, a longer one does not."""
    costs = costs_at(chain(layer("a", output_bytes=10, saved_bytes=4), layer("b", output_bytes=1, saved_bytes=1)), 1)
    assert memory_of(costs, 0, 1, m=3).in_flight == 3 * 10
    assert memory_of(costs, 0, 2, m=3).in_flight == 3 * 5


# ---- exact records, composed


def alive(memory: StageMemory) -> tuple[int, int, int]:
    """Return the bytes of gradients, of engine buffers, and of waiting or running micro-batches."""
    assert memory.total == sum(size for _, size in memory.items())
    return memory.gradients, memory.transfer, memory.in_flight + memory.working


@pytest.mark.parametrize(
    ("first", "end", "m", "recompute", "gradients", "transfer", "held"),
    [
        # Two micro-batches wait; the first one's backward allocates the gradients (120 bytes with them). Input and
        # output are held, and the gradient of the output, 32 bytes, was received.
        (1, 2, 3, "never", 7, 32, 2 * (16 + 52) + 16 + 32 + 120 - 7),
        # The first stage receives nothing but holds the mini-batch, the last its targets and no gradient of the loss.
        (0, 1, 3, "never", 5, 16, 2 * 26 + 16 + 70 - 5 + 3 * 8),
        (2, 3, 3, "never", 11, 0, 2 * (32 + 34) + 32 + 4 + 90 - 11 + 3 * 2),
        (1, 2, 1, "never", 7, 32, 16 + 32 + 120 - 7),
        # Two layers: layer 0's saved bytes (26) are held in the backward of layer 1.
        (0, 2, 1, "never", 12, 32, 32 + 26 + 120 - 12 + 8),
        # All three wait with input and output, then one is recomputed: its output and the sent one are held.
        (1, 2, 3, "always", 7, 32, 3 * (16 + 32) + 120 + 32 - 7),
        # The last one kept its activations, 68 bytes instead of 48.
        (1, 2, 3, "except-last", 7, 32, 3 * (16 + 32) + 20 + 120 + 32 - 7),
    ],
)
def test_exact_memory_under_gpipe_by_hand(  # noqa: PLR0917 - one row of the table
    first: int, end: int, m: int, recompute: Recompute, gradients: int, transfer: int, held: int
) -> None:
    """The first backward is the peak."""
    memory = memory_of(exact(), first, end, m=m, recompute=recompute)
    assert alive(memory) == (gradients, transfer, held)
    parameters = sum((5, 7, 11)[first:end])
    assert (memory.parameters, memory.optimizer, memory.buffers) == (parameters, 2 * parameters, 0)


def test_exact_memory_under_1f1b_by_hand() -> None:
    """One micro-batch waits; a later backward is the peak, with all 7 gradient bytes."""
    memory = memory_of(exact(), 1, 2, m=5, in_flight=2)
    assert alive(memory) == (7, 32 + 16, (16 + 52) + 16 + 16 + 32 + 100)
    assert (memory.parameters, memory.optimizer) == (7, 14)


@pytest.mark.parametrize("waiting", [2, 1])
def test_later_backward_can_be_the_peak(waiting: int) -> None:
    """Many parameters and few activations: once all gradients exist, the second backward needs more than the first."""
    heavy = record(
        internal=10,
        given=[tensor(4, kept=True)],
        made=[tensor(6)],
        forward=20,
        no_grad=10,
        first_backward=100,
        backward=95,
    )
    layers = [layer(str(n), parameter_bytes=(1, 50)[n], detail=heavy) for n in range(2)]
    layers[0] = dataclasses.replace(layers[0], detail=(dataclasses.replace(heavy, outputs=(tensor(4),)),))
    costs = costs_at(chain(*layers, layer("c", detail=record(given=[tensor(6)], made=[tensor(1)]))), 1)
    # The output's gradient and the input's, sent before; input, output, and the backward's own peak.
    assert alive(memory_of(costs, 1, 2, m=2, in_flight=waiting)) == (50, 6 + 4, 4 + 6 + 95)


def test_received_input_of_a_stage_counts_once() -> None:
    """The first layer does not save its input, so the receive buffer is that input: 16 + 1000 bytes in all."""
    costs = costs_at(
        chain(
            layer("a", detail=record(given=[tensor(8)], made=[tensor(16)])),
            layer("relu", detail=record(given=[tensor(16)], made=[tensor(32, kept=True)], forward=1000, no_grad=1000)),
        ),
        1,
    )
    assert memory_of(costs, 1, 2, m=1).total == 16 + 1000


def test_recomputed_stage_counts_its_input_once() -> None:
    """A strided convolution takes 1000 bytes, gives 1, and needs 1500: the peak is its recomputation.

    Input, output, workspace and the output's gradient are alive then: 2502 bytes. Counting the received input again
    would give 3500.
    """
    convolution = record(
        given=[tensor(1000, kept=True)],
        made=[tensor(1)],
        forward=1500,
        no_grad=1500,
        first_backward=1200,
        backward=1200,
    )
    costs = costs_at(
        chain(
            layer("a", detail=record(given=[tensor(8)], made=[tensor(1000)])),
            layer("strided", detail=convolution),
            layer("c", detail=record(given=[tensor(1)], made=[tensor(1)])),
        ),
        1,
    )
    assert memory_of(costs, 1, 2, m=1, recompute="always").total == 1000 + 1 + 1500 + 1


# ---- what holds for any chain


@pytest.mark.parametrize("is_exact", [False, True])
def test_total_memory_is_the_sum_of_its_components(*, is_exact: bool) -> None:
    costs = costs_at(random_profile(3, 6, exact=is_exact, sizes=(1, 4)), 3)
    seen = 0
    for first, end in ((0, 6), (0, 2), (2, 4), (5, 6)):
        for recompute in CHOICES:
            memory = stage_memory(costs, first, end, peak_points_with(3), recompute=recompute, reserve_bytes=12345)
            assert memory.total == sum(size for _, size in memory.items())
            assert memory.reserve == 12345
            assert all(type(size) is int and size >= 0 for _, size in memory.items())
            seen += memory.total
    assert seen > 12 * 12345


def test_optimizer_step_can_be_the_peak() -> None:
    """No micro-batch is in flight then."""
    costs = costs_at(
        chain(
            layer(
                "a",
                parameter_bytes=100,
                optimizer_bytes=200,
                optimizer_peak_bytes=5000,
                output_bytes=10,
                saved_bytes=90,
            ),
            layer("b", optimizer_peak_bytes=40),
        ),
        1,
    )
    memory = memory_of(costs, 0, 2, m=4)
    assert memory == StageMemory.of(
        parameters=100, gradients=100, optimizer=200, buffers=0, in_flight=0, transfer=0, working=5000, reserve=0
    )
    assert memory_of(costs, 0, 2, m=64).in_flight == 64 * 90


def test_recomputation_can_increase_the_peak() -> None:
    """With one micro-batch, the output is held while the activations are recomputed."""
    peaks = {"forward": 60, "no_grad": 40, "first_backward": 90, "backward": 90}
    keeps_output = record(given=[tensor(8)], made=[tensor(30, kept=True)], **peaks)
    costs_from_details = costs_at(chain(*(layer(str(n), detail=keeps_output) for n in range(3))), 1)
    for costs, end in ((additive(), 3), (costs_from_details, 2)):
        assert memory_of(costs, 1, end, m=1, recompute="always").total > memory_of(costs, 1, end, m=1).total
    assert memory_of(additive(), 1, 3, m=4, recompute="always").total < memory_of(additive(), 1, 3, m=4).total


def test_transients_of_a_foreach_optimizer_add_up() -> None:
    """`foreach`, the default on CUDA, needs 5000 + 40 for both layers; otherwise only the larger counts."""
    layers = [layer("a", optimizer_peak_bytes=5000), layer("b", optimizer_peak_bytes=40)]
    for how, peaks in (("largest", (5000, 5000, 40)), ("sum", (5000, 5040, 40))):
        costs = costs_at(dataclasses.replace(chain(*layers), optimizer_peak=how), 1)
        assert tuple(memory_of(costs, *stage, m=1).total for stage in ((0, 1), (0, 2), (1, 2))) == peaks


def in_place_chain(*, writes: bool) -> ChainCosts:
    """Return layers that make 100 bytes, view them, write into them if `writes`, and make 4."""
    written = [tensor(100, alias=0, kept=True)]
    layers = [
        layer("a", detail=record(given=[tensor(8)], made=[tensor(100)])),
        layer("view", detail=record(given=[tensor(100)], made=[tensor(100, alias=0)])),
        layer("in place", detail=record(given=[tensor(100)], made=written, writes_input=writes)),
        layer("d", detail=record(given=[tensor(100)], made=[tensor(4)])),
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize("m", [1, 3])
def test_stage_that_writes_its_received_input_copies_it(m: int) -> None:
    """The copy adds 100 bytes for every micro-batch in flight, also if the layer writes through a view."""
    copying, plain = in_place_chain(writes=True), in_place_chain(writes=False)
    more = [memory_of(copying, n, 4, m=m).total - memory_of(plain, n, 4, m=m).total for n in range(4)]
    assert more == [0, 100 * m, 100 * m, 0]


def skip_chain(*, known: bool, front: int = 300) -> ChainCosts:
    """Return four layers with 10 internal bytes each, and a tensor of 100 bytes that skips layer 1.

    Backward peaks are 300, or 316 at the end of a stage: of output and gradient, 16 bytes each, 16 are within the 300.
    `front` is the peak of the first layer.
    """

    def made(n: int) -> list[BoundaryTensor]:
        skip = [tensor(100)] if n == 0 else [tensor(100, alias=1, relayed=known)] if n == 1 else []
        return [tensor(4 if n == 3 else 16), *skip]

    layers = [
        layer(
            f"layers.{n}",
            detail=record(
                internal=10,
                given=[tensor(8 if n == 0 else 16), *([tensor(100)] if n in {1, 2} else [])],
                made=made(n),
                forward=50,
                no_grad=40,
                first_backward=front if n == 0 else 300,
                backward=front if n == 0 else 300,
                end_first=300 + 16 + 100 * (n == 0) if known else None,
                end_backward=300 + 16 + 100 * (n == 0) if known else None,
            ),
        )
        for n in range(4)
    ]
    return costs_at(chain(*layers), 1)


def two_tensors(*, made: BoundaryTensor, given: BoundaryTensor) -> ChainCosts:
    """Return four layers that make 16 bytes each; layer 0 makes a second tensor that layer 2 reads."""
    skips = {0: [made], 1: [dataclasses.replace(made, alias=1, relayed=True)]}
    peaks = {"forward": 50, "no_grad": 40, "first_backward": 300, "backward": 300}
    layers = [
        layer(
            str(n),
            detail=record(
                internal=10,
                given=[tensor(8 if n == 0 else 16), *([given] if n in {1, 2} else [])],
                made=[tensor(4 if n == 3 else 16), *skips.get(n, [])],
                end_first=316 + (100 + 100 * made.carries) * (n == 0),
                end_backward=316 + (100 + 100 * made.carries) * (n == 0),
                **peaks,
            ),
        )
        for n in range(4)
    ]
    return costs_at(chain(*layers), 1)


@pytest.mark.parametrize("recompute", CHOICES)
@pytest.mark.parametrize(("stage", "gradients"), [((0, 1), 1), ((1, 2), 2), ((2, 4), 1), ((0, 4), 0)])
def test_masks_have_no_gradients(stage: tuple[int, int], gradients: int, recompute: Recompute) -> None:
    carrying, mask = (
        stage_memory_table(two_tensors(made=size, given=size), np.array([stage[0]]), slice(*stage), micro_batches=4)
        for size in (tensor(100), tensor(100, carries=False))
    )
    less = [(one.output_gradient + one.input_gradient)[0, -1].item() for one in (carrying, mask)]
    assert less[0] - less[1] == 100 * gradients
    assert mask.input[0, -1] == carrying.input[0, -1]


def test_received_view_does_not_hold_the_whole_storage() -> None:
    """Torch's `mse_loss` returns a view of the storage of all errors, which only its own stage holds."""
    whole, view = (two_tensors(made=tensor(100), given=tensor(size)) for size in (100, 4))
    stages = [stage_memory_table(costs, np.array([0, 1]), slice(0, 4), micro_batches=4) for costs in (whole, view)]
    assert [one.output[0, 0].item() for one in stages] == [116, 116]
    crossing = [(one.input[1, 0], one.input_gradient[1, 0], one.output_gradient[0, 0]) for one in stages]
    assert crossing == [(116, 116, 116), (20, 20, 20)]


@pytest.mark.parametrize(("recompute", "more"), [("never", 10 + 16), ("always", 16)])
def test_relayed_tensor_is_held_once(recompute: Recompute, more: int) -> None:
    """Layer 1 receives and sends 116 bytes, of which 100 are the same storage; gradients likewise."""
    costs = skip_chain(known=True)
    for m in (3, 4, 9):
        # In 1F1B every micro-batch in flight adds its input, and what it keeps or its own output.
        few, many = (memory_of(costs, 1, 2, m=20, recompute=recompute, in_flight=n).total for n in (m, m + 1))
        assert many - few == 116 + more
    # What was received, and the layer's backward with the gradients of all that was sent, which go on to the input.
    assert memory_of(costs, 1, 2, m=1).total == 116 + 316
    # Under GPipe eight others wait, each with its input, saved bytes and output.
    assert memory_of(costs, 1, 2, m=9).total == 8 * (116 + 10 + 16) + 116 + 316


def test_relayed_gradient_is_held_once() -> None:
    """Layer 1 passes the gradient of 100 bytes to layer 0, whose peak includes it."""
    costs = skip_chain(known=True, front=900)
    apart = dataclasses.replace(
        costs, relays=dataclasses.replace(costs.relays, bytes=np.zeros(len(costs.relays.bytes)))
    )
    for recompute in CHOICES:
        for end in (2, 3):  # after layer 2, which reads the tensor, none is received
            held, twice = (memory_of(each, 0, end, m=1, recompute=recompute).total for each in (costs, apart))
            assert twice - held == (100 if end == 2 else 0)
    # The mini-batch, layer 0's backward, the output that was sent, its gradient.
    assert memory_of(costs, 0, 2, m=1).total == 8 + (900 - 100) + 116 + 116


def test_unknown_peaks_at_the_end_of_a_stage_add_output_and_gradient() -> None:
    """Older profiles lack these peaks."""
    known, unknown = skip_chain(known=True), skip_chain(known=False)
    assert memory_of(unknown, 2, 3, m=1).total == 116 + 300 + 16 + 16
    assert memory_of(known, 2, 3, m=1).total == 116 + 316


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_peaks_of_many_stages_equal_those_of_each(in_flight: int, *, is_exact: bool) -> None:
    costs = costs_at(random_profile(17, 9, exact=is_exact, sizes=(1, 4)), 3)
    firsts = np.array([0, 1, 2, 4, 5, 8])
    compared = 0
    totals = peak_bytes_of_stages(costs, firsts, slice(0, 9), peak_points_with(5, in_flight), choices=CHOICES)
    for recompute, rows in zip(CHOICES, totals, strict=True):
        for row, first in enumerate(firsts.tolist()):
            for end in range(first + 1, 10):
                alone = memory_of(costs, first, end, m=5, recompute=recompute, in_flight=in_flight)
                assert rows[row, end - 1] == alone.total
                compared += 1
    assert compared == 3 * (9 + 8 + 7 + 5 + 4 + 1)


@pytest.mark.parametrize(("m", "recompute", "more"), [(1, "never", 20), (3, "never", 28), (3, "always", 24)])
def test_tensors_in_attributes_are_counted(m: int, recompute: Recompute, more: int) -> None:
    """A forward renews 4 of 20 bytes; waiting and recomputed micro-batches hold them."""
    costs = exact()
    levels = dataclasses.replace(costs.memory, attributes=np.array([0.0, 20.0, 0.0]), renewed=np.array([0.0, 4.0, 0.0]))
    with_attributes = dataclasses.replace(costs, memory=levels)
    plain = memory_of(costs, 1, 2, m=m, recompute=recompute).total
    assert memory_of(with_attributes, 1, 2, m=m, recompute=recompute).total == plain + more


@pytest.mark.parametrize("is_exact", [False, True])
def test_memory_grows_with_micro_batches_in_flight(*, is_exact: bool) -> None:
    for seed in range(6):
        costs = costs_at(random_profile(seed, 6, exact=is_exact), 1)
        firsts = np.arange(6)
        valid = np.arange(6)[None, :] >= firsts[:, None]

        def totals_with(m: int, in_flight: int, recompute: Recompute) -> NDArray[np.float64]:
            points = peak_points_with(m, in_flight)
            (rows,) = peak_bytes_of_stages(costs, firsts, slice(0, 6), points, choices=[recompute])  # noqa: B023
            return rows[valid]  # noqa: B023

        for recompute in CHOICES:
            totals = [totals_with(m, m, recompute) for m in (1, 2, 3, 5, 9)]
            for fewer, more in pairwise(totals):
                assert (more >= fewer).all()
            assert (totals[-1] > totals[0]).any()
            for k in (1, 2, 3, 4):
                assert (totals_with(9, k, recompute) <= totals[-1]).all()


@pytest.mark.parametrize("is_exact", [False, True])
def test_state_of_a_stage_grows_with_its_layers(*, is_exact: bool) -> None:
    costs = costs_at(random_profile(23, 7, exact=is_exact), 1)
    stages = stage_memory_table(costs, np.arange(7), slice(0, 7), micro_batches=2)
    for name in ("parameters", "optimizer", "buffers"):
        item = stages.always[name]
        for first in range(7):
            assert (np.diff(item[first, first:]) >= 0).all()
            assert all(item[first, end] >= item[first + 1, end] for end in range(first + 1, 7))


def test_exact_memory_is_at_most_the_additive_bound() -> None:
    """The additive form assumes that everything is held at once."""
    layers = []
    for n, (internal, output, peak) in enumerate(((10, 16, 5), (20, 32, 9), (30, 4, 3))):
        crossing = (8, 16, 32)[n]
        layers.append(
            layer(
                f"layers.{n}",
                parameter_bytes=50,
                output_bytes=output,
                saved_bytes=internal + output,
                forward_peak_bytes=internal + output + peak,
                backward_peak_bytes=internal + output + crossing + 50 + peak,
                detail=record(
                    internal=internal,
                    given=[tensor(crossing)],
                    made=[tensor(output, kept=True)],
                    forward=internal + output + peak,
                    no_grad=output + peak,
                    first_backward=internal + output + crossing + 50 + peak,
                    backward=internal + output + crossing + peak,
                ),
            )
        )
    profile = chain(*layers)
    plain = dataclasses.replace(profile, layers=tuple(dataclasses.replace(x, detail=()) for x in profile.layers))
    for m in (1, 2, 4):
        for recompute in CHOICES:
            for first, end in ((1, 2), (1, 3), (2, 3)):
                bound = memory_of(costs_at(plain, 1), first, end, m=m, recompute=recompute).total
                assert memory_of(costs_at(profile, 1), first, end, m=m, recompute=recompute).total <= bound
