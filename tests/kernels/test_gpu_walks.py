"""How the Triton backend walks over sequences: borders of chunks, what it launches, ids and offsets that are wrong."""

import os
import random

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import calls, oracle
from tests.cases.batches import make_batch
from tests.cases.checks import check_call, run_with_gradient
from tests.cases.compare import assert_close, assert_same_bits
from tests.cases.shapes import random_rows

# With chunks of 2: macro actions that end at a border, cross one or several, and are followed by holes up to one or
# over one; holes at the start and the end of the row; rows that end in a chunk's middle.
BORDERS = [
    [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 4],
    [0, 0, -1, -1, 1, -1, -1, -1, 1, 2, -1, -1, -1, -1],
    [-1, -1, -1, 0, -1, 0, 0, -1, 1, -1, -1, 1, 2, 2, -1],
    [-1, -1, -1, -1, -1],
    [0] * 9,
    [0, 1, 2, 3, 4, 5, 6],
    [0],
    [],
]
CALLS = [
    *calls.ONE_EACH,
    *(calls.reduce_call(weights=w) for w in oracle.REWARD_WEIGHTS if w != "discounted_sum"),
    calls.reduce_call(weights="discounted_sum", discount=0.9),
    *(
        calls.gae_call(bootstrap=True, reward_weights=r, value_weights=v, discount_per=p, gamma=0.97, lam=0.9)
        for r, v, p in (
            ("sum", "mean", "macro"),
            ("mean", "position", "token"),
            ("position_reversed", "first", "macro"),
            ("first", "last", "token"),
        )
    ),
    *(calls.value_call(level="macro", value_weights=v) for v in oracle.VALUE_WEIGHTS),
]


@pytest.fixture(autouse=True)
def gpu(backend):
    """Skips for every other backend; the Triton package is imported only here."""
    if backend.name != "gpu":
        pytest.skip("about the Triton backend alone")


@pytest.fixture
def small_chunks(gpu, monkeypatch):
    """Chunks of 2 tokens, several rows a program and several programs."""
    from marlhf_kernels.gpu import _rows

    monkeypatch.setattr(_rows, "tile_for", lambda rows, longest: _rows.Tile(8, 2, 1))


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("layout", ["mixed", "packed with a tail"])
def test_borders_of_chunks(call, layout, small_chunks):
    """Macro actions before, at and across the borders of chunks: the loop oracle's numbers."""
    check_call(call, make_batch([*BORDERS, *random_rows(3, 11)], layout, torch.float32))


@pytest.mark.parametrize("layout", ["right", "packed"])
def test_segmentation_over_chunks(layout, small_chunks):
    """Counts, sums and the last token are carried over borders."""
    batch = make_batch(BORDERS, layout)
    rng = random.Random(0)
    masks = [[k >= 0 for k in row] for row in BORDERS]
    ref = [[rng.choice([-0.1, -0.3, -0.7, -2.0]) for _ in row] for row in BORDERS]
    ends = [[rng.random() < 0.4 for _ in row] for row in BORDERS]
    lengths = [[2] * (sum(mask) // 2) + [1] * (sum(mask) % 2) for mask in masks]

    def laid(rows, dtype):
        return batch.layout.lay([[float(x) for x in row] for row in rows], 0.0, dtype)

    mask = laid(masks, torch.float32).bool()
    found = {
        "fixed": segmentation.fixed_ngram(mask, 3, **batch.keywords),
        "mean": segmentation.perplexity(mask, laid(ref, torch.float32), **batch.keywords),
        "neighbour": segmentation.perplexity(mask, laid(ref, torch.float32), rule="neighbour", **batch.keywords),
        "ends": segmentation.from_ends(mask, laid(ends, torch.float32).bool(), **batch.keywords),
        "lengths": segmentation.from_lengths(mask, lengths, **batch.keywords),
        "last": segmentation.isolate_last(batch.macro_ids, **batch.keywords),
    }
    for b, row in enumerate(BORDERS):
        want = {
            "fixed": oracle.fixed_ngram(masks[b], 3),
            "mean": oracle.perplexity(masks[b], ref[b]),
            "neighbour": oracle.perplexity(masks[b], ref[b], "neighbour"),
            "ends": oracle.from_ends(masks[b], ends[b]),
            "lengths": oracle.from_lengths(masks[b], lengths[b]),
            "last": oracle.isolate_last(row),
        }
        for rule, ids in found.items():
            assert batch.layout.rows(ids)[b] == want[rule], f"{rule}, row {b}"


@pytest.mark.slow
@pytest.mark.parametrize("longest", [6, 40000])
def test_a_row_of_131072_tokens(longest):
    """Carries over many chunks stay within the budget, with short macro actions and with giant ones."""
    rng = random.Random(longest)
    row, k = [], 0
    while len(row) < 131072:
        row += [k] * rng.randint(1, longest)
        k += 1
    call = calls.rollout_call(
        bootstrap=True, kl_coef=0.1, gamma=0.999, lam=0.95, reward_weights="mean", value_weights="position"
    )
    check_call(call, make_batch([row[:131072]], "packed", torch.float32))


LAUNCHES = {
    "rollout_advantages": (1, 0),
    "macro_gae": (1, 0),
    "kl_penalized_rewards": (1, 0),
    "macro_policy_loss": (2, 1),
    "macro_value_loss": (2, 1),
    "macro_reduce": (1, 1),
    "macro_broadcast": (1, 1),
    "macro_lengths": (1, 0),
}


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize(
    "call",
    [
        *(c for c in calls.ONE_EACH if c.op not in ("macro_reduce", "macro_lengths")),
        calls.reduce_call(weights="position", num_macros=9),
        calls.lengths_call(num_macros=9),
    ],
    ids=str,
)
def test_launches(call, layout):
    """One launch for a whole batch, two for a loss, one for each backward."""
    from marlhf_kernels.gpu.launch import intercepted, start

    batch = make_batch(BORDERS, layout, torch.float32)
    names = []

    def note(kernel, *rest):
        names.append(kernel.__name__)
        start(kernel, *rest)

    forward, backward = LAUNCHES[call.op]
    with intercepted(note):
        call.run(batch)
        assert len(names) == forward
        run_with_gradient(call, batch)
        assert len(names) == 2 * forward + backward


def test_ids_beyond_num_macros_are_dropped():
    """Where an error would need the host to wait, an id that has no room is left out, and gets gradient 0."""
    ids = torch.tensor([[0, 1, 2, 2]], dtype=torch.int32)
    x = torch.tensor([[1.0, 2.0, 4.0, 8.0]], requires_grad=True)
    reduced = mk.macro_reduce(x, ids, num_macros=2)
    assert reduced.tolist() == [[1.0, 2.0]]
    assert mk.macro_lengths(ids, num_macros=2).tolist() == [[1, 1]]
    assert mk.macro_broadcast(torch.tensor([[3.0, 5.0]]), ids).tolist() == [[3.0, 5.0, 0.0, 0.0]]
    for weights in oracle.REWARD_WEIGHTS:
        x.grad = None
        mk.macro_reduce(x, ids, weights=weights, num_macros=2).sum().backward()
        assert x.grad.tolist() == [[1.0, 1.0, 0.0, 0.0]], weights


@pytest.mark.parametrize("call", calls.ONE_EACH, ids=str)
@pytest.mark.parametrize("offsets", [[0, 5, 3, 9], [-7, 4, 1000, 2**31 - 1], [7, 7, 0, -(2**31)]])
def test_any_offsets_are_memory_safe(call, offsets):
    """cu_seqlens that describe no packing, which a GPU does not read back: nothing outside of the tensors changes."""
    batch = make_batch([[0, 0, 1], [0, 1], [0, 1, 1, 2]], "packed", torch.float32)
    want = run_with_gradient(call, batch)
    offsets = torch.tensor(offsets, dtype=torch.int32)
    batch.keywords["cu_seqlens"] = offsets
    before = {name: x.clone() for name, x in batch.fields.items()}
    run_with_gradient(call, batch)
    for name, x in before.items():
        assert_same_bits(batch[name], x, name)
    batch.keywords["cu_seqlens"] = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    for a, b in zip(run_with_gradient(call, batch)[0], want[0], strict=True):
        assert_close(a, b)


@pytest.fixture
def traffic(gpu, monkeypatch):
    """Counts bytes in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("only the interpreter shows what a kernel loads and stores")
    from tests.cases.interpreter import Traffic

    return Traffic(monkeypatch)


@pytest.mark.parametrize("layout", ["right", "packed"])
@pytest.mark.parametrize(
    ("call", "per_token"),
    [
        (calls.rollout_call(kl_coef=0.1), 32),
        (calls.gae_call(), 20),
        (calls.kl_call(kl_coef=0.1), 20),
        (calls.policy_call(), 20),
        (calls.value_call(), 20),
        (calls.reduce_call(num_macros=3), 8),
        (calls.lengths_call(num_macros=3), 4),
        (calls.BROADCAST, 8),
    ],
    ids=str,
)
def test_bytes_moved(call, per_token, layout, traffic):
    """What the docstrings say for float32 and int32 ids; beside it only what is per sequence or per macro action."""
    rows, length = 3, 40
    batch = make_batch([[t // 20 for t in range(length)]] * rows, layout, torch.float32)
    call.run(batch)
    tokens = batch.macro_ids.numel()
    assert per_token * tokens <= traffic.bytes <= per_token * tokens + 40 * rows


@pytest.mark.parametrize(
    ("build", "per_token"),
    [
        (lambda mask, x: segmentation.fixed_ngram(mask, 3), 5),
        (lambda mask, x: segmentation.from_ends(mask, mask), 5),
        (lambda mask, x: segmentation.from_ends(mask, ~mask), 6),
        (lambda mask, x: segmentation.perplexity(mask, x), 9),
        (lambda mask, x: segmentation.isolate_last(torch.zeros(mask.shape, dtype=torch.int32)), 8),
    ],
)
def test_bytes_moved_by_builders(build, per_token, traffic):
    """Mask, what is given beside it, and the ids: each once."""
    mask = torch.ones(3, 40, dtype=torch.bool)
    build(mask, torch.randn(3, 40))
    assert traffic.bytes == per_token * mask.numel()
