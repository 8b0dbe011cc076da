"""Bad input is a clear error before any work: what was wrong, in the caller's words."""

import math

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import marlhf_kernels as mk
from marlhf_kernels import segmentation
from tests.cases import oracle
from tests.cases.calls import ONE_EACH

pytestmark = pytest.mark.usefixtures("backend")
BAD = (ValueError, TypeError)

X = torch.zeros(2, 3)
IDS = torch.tensor([[0, 0, 1], [0, 1, -1]], dtype=torch.int32)
ROW = torch.zeros(2)
LOGITS, LABELS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
PACKED_IDS = torch.tensor([0, 0, 1, 0, 1], dtype=torch.int32)
CU = torch.tensor([0, 3, 5], dtype=torch.int32)

# The tensor arguments of every macro op, by name and in order.
ARGUMENTS = {
    "macro_reduce": ["x"],
    "kl_penalized_rewards": ["scores", "logprobs", "ref_logprobs"],
    "macro_gae": ["rewards", "values"],
    "rollout_advantages": ["scores", "logprobs", "ref_logprobs", "values"],
    "macro_policy_loss": ["logprobs", "old_logprobs", "advantages"],
    "macro_value_loss": ["values", "old_values", "returns"],
}
REQUIRED = {"kl_penalized_rewards": {"kl_coef": 0.1}, "rollout_advantages": {"kl_coef": 0.1}}
PER_SEQUENCE = ("scores", "bootstrap_values")


def good(op):
    """Valid arguments by position, without the ids."""
    return [ROW if name in PER_SEQUENCE else X for name in ARGUMENTS[op]]


def call(op, tensors=None, ids=IDS, **options):
    return getattr(mk, op)(*(tensors or good(op)), ids, **{**REQUIRED.get(op, {}), **options})


def each_argument():
    return [(op, i, name) for op, names in ARGUMENTS.items() for i, name in enumerate(names)]


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_good_call_is_good(op):
    """The arguments that the other tests spoil work as they are."""
    call(op)


@pytest.mark.parametrize(("op", "i", "name"), each_argument())
def test_wrong_shape(op, i, name):
    """A tensor of another shape than the ids' is named, with both shapes."""
    for bad in (torch.zeros(2, 4), torch.zeros(3), torch.zeros(2, 3, 1)):
        tensors = good(op)
        tensors[i] = bad
        with pytest.raises(ValueError, match=name):
            call(op, tensors)


@pytest.mark.parametrize(("op", "i", "name"), each_argument())
def test_wrong_dtype(op, i, name):
    """An integer, boolean or complex tensor where a floating one belongs is named with its dtype."""
    for dtype in (torch.int64, torch.bool, torch.complex64):
        tensors = good(op)
        tensors[i] = tensors[i].to(dtype)
        with pytest.raises(BAD, match=rf"{name}.*{str(dtype).removeprefix('torch.')}"):
            call(op, tensors)


@pytest.mark.parametrize(("op", "i", "name"), each_argument())
def test_wrong_device(op, i, name):
    """A tensor on another device than the rest is named with both devices."""
    tensors = good(op)
    tensors[i] = tensors[i].to("meta")
    with pytest.raises(BAD, match=rf"(?s){name}.*meta"):
        call(op, tensors)


@pytest.mark.parametrize(("op", "i", "name"), each_argument())
def test_not_a_tensor(op, i, name):
    """A list or None where a tensor belongs is a TypeError with the argument's name."""
    for bad in ([1.0], None, 3.0):
        tensors = good(op)
        tensors[i] = bad
        with pytest.raises(TypeError, match=name):
            call(op, tensors)


@pytest.mark.parametrize("op", [*ARGUMENTS, "macro_lengths", "macro_broadcast"])
@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (IDS.float(), "macro_ids.*float32"),
        (IDS.bool(), "macro_ids.*bool"),
        (IDS.to(torch.int16), "macro_ids.*int16"),
        (IDS[None], "macro_ids"),
        (IDS[0], "cu_seqlens"),
        (None, "macro_ids"),
    ],
    ids=["float", "bool", "int16", "3-d", "packed without cu_seqlens", "none"],
)
def test_wrong_ids(op, ids, match):
    """macro_ids is int32 or int64, [B, T], or packed with cu_seqlens."""
    others = {
        "macro_lengths": lambda: mk.macro_lengths(ids),
        "macro_broadcast": lambda: mk.macro_broadcast(torch.zeros(2, 2), ids),
    }
    run = others.get(op, lambda: call(op, ids=ids))
    with pytest.raises(BAD, match=match):
        run()


@pytest.mark.parametrize(
    ("cu", "match"),
    [
        (CU.long(), "cu_seqlens.*int64"),
        (CU.float(), "cu_seqlens.*float32"),
        (CU[None], "cu_seqlens"),
        (CU[:0], "cu_seqlens"),
        ([0, 3, 5], "cu_seqlens"),
        (CU.to("meta"), "cu_seqlens.*meta"),
    ],
    ids=["int64", "float", "2-d", "empty", "list", "device"],
)
def test_wrong_cu_seqlens(cu, match):
    """cu_seqlens is an int32 tensor [B + 1] on the same device."""
    with pytest.raises(BAD, match=match):
        mk.macro_reduce(torch.zeros(5), PACKED_IDS, cu_seqlens=cu)
    with pytest.raises(BAD, match=match):
        segmentation.token(torch.ones(5, dtype=torch.bool), cu_seqlens=cu)


def test_padded_tensors_with_cu_seqlens():
    """[B, T] together with cu_seqlens is refused: one of the two is a mistake."""
    with pytest.raises(BAD, match="cu_seqlens"):
        mk.macro_reduce(X, IDS, cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32))


@pytest.mark.parametrize(
    ("cu", "match"),
    [([1, 3, 5], "0"), ([0, 4, 3], "cu_seqlens"), ([0, 3, 6], "cu_seqlens"), ([0, -1, 5], "cu_seqlens")],
    ids=["first", "falling", "past the end", "negative"],
)
def test_cu_seqlens_that_describe_no_packing(cu, match, backend):
    """On a CPU, offsets that do not start at 0, fall, or pass the end are an error and touch no foreign memory."""
    if backend.name == "gpu":
        pytest.skip("on a GPU the offsets cannot be read without a host sync")
    with pytest.raises(ValueError, match=match):
        mk.macro_reduce(torch.zeros(5), PACKED_IDS, cu_seqlens=torch.tensor(cu, dtype=torch.int32))


@pytest.mark.parametrize(
    ("run", "name", "known"),
    [
        (lambda v: mk.macro_reduce(X, IDS, weights=v), "weights", oracle.REWARD_WEIGHTS),
        (lambda v: call("macro_gae", reward_weights=v), "reward_weights", oracle.REWARD_WEIGHTS),
        (lambda v: call("macro_gae", value_weights=v), "value_weights", oracle.VALUE_WEIGHTS),
        (lambda v: call("macro_gae", discount_per=v), "discount_per", ("macro", "token")),
        (lambda v: call("kl_penalized_rewards", kl_estimator=v), "kl_estimator", oracle.KL_ESTIMATORS),
        (lambda v: call("rollout_advantages", kl_estimator=v), "kl_estimator", oracle.KL_ESTIMATORS),
        (lambda v: call("rollout_advantages", reward_weights=v), "reward_weights", oracle.REWARD_WEIGHTS),
        (lambda v: call("rollout_advantages", value_weights=v), "value_weights", oracle.VALUE_WEIGHTS),
        (lambda v: call("rollout_advantages", discount_per=v), "discount_per", ("macro", "token")),
        (lambda v: call("macro_policy_loss", ratio_level=v), "ratio_level", oracle.RATIO_LEVELS),
        (lambda v: call("macro_policy_loss", normalize_by=v), "normalize_by", oracle.NORMALIZE_BY),
        (lambda v: call("macro_value_loss", level=v), "level", ("token", "macro")),
        (lambda v: call("macro_value_loss", value_weights=v), "value_weights", oracle.VALUE_WEIGHTS),
        (lambda v: call("macro_value_loss", normalize_by=v), "normalize_by", oracle.NORMALIZE_BY),
    ],
)
def test_unknown_names(run, name, known):
    """An unknown option name is an error that names the option, the value and every known name."""
    with pytest.raises(ValueError, match="mittel") as error:
        run("mittel")
    message = str(error.value)
    assert name in message
    for word in known:
        assert word in message


@pytest.mark.parametrize("weights", ["sum", "discounted_sum"])
def test_values_are_averaged_never_summed(weights):
    """A value's weights sum to one: "sum" and "discounted_sum" are rewards' names only."""
    for op in ("macro_gae", "rollout_advantages", "macro_value_loss"):
        with pytest.raises(ValueError, match="value_weights"):
            call(op, value_weights=weights)


@pytest.mark.parametrize("weights", [w for w in oracle.REWARD_WEIGHTS if w != "discounted_sum"])
def test_discount_belongs_to_discounted_sum(weights):
    """A discount other than 1 with any other weight raises; 1 does not."""
    mk.macro_reduce(X, IDS, weights=weights, discount=1.0)
    with pytest.raises(ValueError, match="discounted_sum"):
        mk.macro_reduce(X, IDS, weights=weights, discount=0.9)


def test_hyper_parameters_are_keyword_only():
    """A bare number after the tensors is refused."""
    for run in (
        lambda: mk.macro_reduce(X, IDS, "mean"),
        lambda: mk.macro_gae(X, X, IDS, 0.9),
        lambda: mk.macro_policy_loss(X, X, X, IDS, 0.2),
        lambda: mk.macro_value_loss(X, X, X, IDS, 0.2),
        lambda: mk.token_logprobs(LOGITS, LABELS, 1.0),
        lambda: mk.masked_whiten(X, X.bool(), True),
        lambda: mk.kl_penalized_rewards(ROW, X, X, IDS, 0.1),
    ):
        with pytest.raises(TypeError):
            run()


@pytest.mark.parametrize("num_macros", [-1, 2.5, "3", torch.tensor(3)])
def test_wrong_num_macros(num_macros):
    """num_macros is an int >= 0."""
    with pytest.raises(BAD, match="num_macros"):
        mk.macro_reduce(X, IDS, num_macros=num_macros)
    with pytest.raises(BAD, match="num_macros"):
        mk.macro_lengths(IDS, num_macros=num_macros)


def test_macro_x_shapes():
    """macro_broadcast wants [B, K] with the B of the ids."""
    for bad in (torch.zeros(3, 2), torch.zeros(2), torch.zeros(2, 2, 1)):
        with pytest.raises(ValueError, match="macro_x"):
            mk.macro_broadcast(bad, IDS)
    with pytest.raises(BAD, match="macro_x"):
        mk.macro_broadcast([[0.0, 0.0]], IDS)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), [0.0, 0.0]])
def test_wrong_bootstrap(bad):
    """bootstrap_values is a floating tensor [B]."""
    for op in ("macro_gae", "rollout_advantages"):
        with pytest.raises(BAD, match="bootstrap_values"):
            call(op, bootstrap_values=bad)


@pytest.mark.parametrize(
    ("op", "options", "match"),
    [
        ("macro_policy_loss", {"clip_low": -0.1}, "clip_low"),
        ("macro_policy_loss", {"clip_high": -0.1}, "clip_high"),
        ("macro_policy_loss", {"dual_clip": 1.2}, "dual_clip"),
        ("macro_policy_loss", {"dual_clip": 1.1}, "dual_clip"),
        ("macro_policy_loss", {"clip_high": 3.0, "dual_clip": 3.5}, "dual_clip"),
        ("macro_value_loss", {"clip": -0.1}, "clip"),
        ("rollout_advantages", {"score_clip": -1.0}, "score_clip"),
        ("kl_penalized_rewards", {"score_clip": -1.0}, "score_clip"),
        ("macro_gae", {"gamma": math.nan}, "gamma"),
        ("macro_gae", {"lam": "0.9"}, "lam"),
        ("macro_gae", {"gamma": torch.ones(2)}, "gamma"),
        ("kl_penalized_rewards", {"kl_coef": torch.ones(1, 1)}, "kl_coef"),
        ("kl_penalized_rewards", {"kl_coef": None}, "kl_coef"),
        ("macro_policy_loss", {"normalizer": torch.ones(2)}, "normalizer"),
        ("macro_policy_loss", {"clip_low": None}, "clip_low"),
    ],
    ids=str,
)
def test_coefficients_out_of_range(op, options, match):
    """Numbers outside their range, NaN, strings and tensors that are not 0-d are named."""
    with pytest.raises(BAD, match=match):
        call(op, **options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 0, math.nan, math.inf, "1", None, torch.ones(2), torch.ones(5)])
def test_wrong_temperature(temperature):
    """temperature is a number > 0 or a tensor shaped like the labels."""
    with pytest.raises(BAD, match="temperature"):
        mk.token_logprobs(LOGITS, LABELS, temperature=temperature)


def test_temperatures_of_zero_in_a_tensor(backend):
    """On a CPU a row's temperature of 0 is found."""
    if backend.name == "gpu":
        pytest.skip("on a GPU it cannot be read without a host sync")
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            mk.token_logprobs(LOGITS, LABELS, temperature=torch.tensor(bad))
        rows = torch.ones(2, 3)
        rows[1, 2] = bad
        with pytest.raises(ValueError, match="temperature"):
            mk.token_logprobs(LOGITS, LABELS, temperature=rows)


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan, "30"])
def test_wrong_softcap(softcap):
    """logit_softcap is a number > 0 or None."""
    with pytest.raises(BAD, match="logit_softcap"):
        mk.token_logprobs(LOGITS, LABELS, logit_softcap=softcap)


@pytest.mark.parametrize("label", [5, 6, 2**31])
def test_label_out_of_range(label, backend):
    """On a CPU a label >= V is an error that names the label and V."""
    if backend.name == "gpu":
        pytest.skip("on a GPU it cannot be read without a host sync")
    labels = LABELS.clone()
    labels[1, 2] = label
    with pytest.raises((ValueError, IndexError), match=rf"{label}"):
        mk.token_logprobs(LOGITS, labels)


@pytest.mark.parametrize(
    ("logits", "labels", "match"),
    [
        (LOGITS, LABELS[0], "labels"),
        (LOGITS, LABELS[..., None], "labels"),
        (LOGITS, LABELS.float(), "labels.*float32"),
        (LOGITS, LABELS.to(torch.int16), "labels.*int16"),
        (LOGITS, LABELS.bool(), "labels.*bool"),
        (LOGITS.long(), LABELS, "logits.*int64"),
        (LOGITS[..., :0], LABELS, "logits"),
        (LOGITS, LABELS.to("meta"), "labels.*meta"),
        (torch.zeros(()), torch.tensor(0), "logits"),
        ([[1.0]], torch.tensor([0]), "logits"),
        (LOGITS, [0, 1], "labels"),
    ],
)
def test_wrong_logits_or_labels(logits, labels, match):
    """Shapes, dtypes and devices of logits and labels."""
    with pytest.raises(BAD, match=match):
        mk.token_logprobs(logits, labels)


@pytest.mark.parametrize(
    ("x", "mask", "match"),
    [
        (X, torch.ones(2, 3), "mask.*float32"),
        (X, torch.ones(2, 3, dtype=torch.int64), "mask.*int64"),
        (X, torch.ones(3, 2, dtype=torch.bool), "mask"),
        (X.long(), torch.ones(2, 3, dtype=torch.bool), "x.*int64"),
        (X, torch.ones(2, 3, dtype=torch.bool, device="meta"), "mask.*meta"),
    ],
)
def test_wrong_whitening(x, mask, match):
    """masked_whiten wants a floating tensor and a bool mask of its shape."""
    with pytest.raises(BAD, match=match):
        mk.masked_whiten(x, mask)


@pytest.fixture(scope="module")
def sharded():
    """A function that makes a DTensor of a tensor, on a mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda x: distribute_tensor(x, mesh, [Replicate()])
    dist.destroy_process_group()


def test_dtensor_shards(sharded):
    """A DTensor is refused by name, with the way out: the shard alone would give a wrong number."""
    runs = [
        lambda: mk.token_logprobs(sharded(LOGITS), LABELS),
        lambda: mk.masked_whiten(sharded(X), X.bool()),
        lambda: segmentation.token(sharded(X.bool())),
        lambda: mk.macro_lengths(sharded(IDS)),
        lambda: mk.macro_broadcast(sharded(X), IDS),
        *(lambda op=op: call(op, [sharded(x) for x in good(op)]) for op in ARGUMENTS),
        *(lambda op=op: call(op, ids=sharded(IDS)) for op in ARGUMENTS),
    ]
    for run in runs:
        with pytest.raises(TypeError, match=r"DTensor.*(full_tensor|to_local)"):
            run()


def test_parameters_and_subclass_free_tensors_are_fine():
    """A Parameter is a tensor."""
    out = mk.macro_value_loss(torch.nn.Parameter(X.clone()), X, X, IDS)
    out.loss.backward()


def test_errors_come_before_work():
    """A bad option is found even where there is no row to work on."""
    empty = torch.zeros(0, 3)
    with pytest.raises(ValueError, match="weights"):
        mk.macro_reduce(empty, empty.int(), weights="mittel")
    with pytest.raises(ValueError, match="ratio_level"):
        mk.macro_policy_loss(empty, empty, empty, empty.int(), ratio_level="mittel")


def test_every_op_is_covered():
    """The table of arguments speaks of every macro op."""
    assert {c.op for c in ONE_EACH} == {*ARGUMENTS, "macro_broadcast", "macro_lengths"}
