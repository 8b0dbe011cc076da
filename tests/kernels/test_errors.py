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
HIDDEN, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(5, 4)
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


def linear_loss(**changes):
    """linear_macro_policy_loss of valid arguments but for `changes`."""
    arguments = {
        "hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, "old_logprobs": X, "advantages": X, "macro_ids": IDS
    }  # fmt: skip
    return mk.linear_macro_policy_loss(**{**arguments, **changes})


def each_argument():
    return [(op, i, name) for op, names in ARGUMENTS.items() for i, name in enumerate(names)]


@pytest.mark.parametrize("op", ARGUMENTS)
def test_the_good_call_is_good(op):
    """The arguments that the other tests spoil work as they are."""
    call(op)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: mk.macro_gae(X, torch.zeros(2, 4), IDS),
            "values has shape [2, 4], but macro_ids has [2, 3]; they must be equal, entry for entry about the same "
            "token",
        ),
        (
            lambda: call("kl_penalized_rewards", [torch.zeros(3), X, X]),
            "scores must be [B] = [2], one per sequence, got shape [3]",
        ),
        (
            lambda: mk.macro_lengths(IDS[0]),
            "macro_ids must be [B, T], got shape [3]; packed [N] tensors need cu_seqlens",
        ),
        (
            lambda: linear_loss(weight=torch.zeros(5, 3)),
            "weight must be [V, H] with V >= 1 and H = 4, that of hidden, got shape [5, 3]",
        ),
        (lambda: mk.macro_reduce(X.long(), IDS), "x must be float32, bfloat16, float16 or float64, got int64"),
        (lambda: mk.macro_lengths(IDS.float()), "macro_ids must be int32 or int64, got float32"),
        (
            lambda: segmentation.whole(IDS),
            "mask must be bool (True on a real token), got int32; pass e.g. `mask > 0`",
        ),
        (lambda: mk.macro_reduce(X.to("meta"), IDS), "x is on meta, but macro_ids is on cpu; move one of them"),
        (
            lambda: mk.macro_gae(X, X, IDS, lam=torch.zeros((), device="meta")),
            "lam is on meta, but the data is on cpu; move it there or to the CPU",
        ),
        (lambda: mk.macro_reduce([[1.0]], IDS), "x must be a torch.Tensor, got list"),
        (
            lambda: mk.macro_reduce(X.to_sparse(), IDS),
            "x must be a dense tensor, got layout torch.sparse_coo; call x.to_dense()",
        ),
        (
            lambda: mk.token_logprobs(LOGITS, LABELS, temperature=0.0),
            "temperature must be greater than 0, got 0.0",
        ),
        (lambda: linear_loss(temperature=-1), "temperature must be greater than 0, got -1"),
        (
            lambda: mk.macro_reduce(X, IDS, weights="median"),
            "unknown weights 'median'; known: sum, discounted_sum, mean, first, last, position, position_reversed",
        ),
        (
            lambda: linear_loss(ratio_level="sequence"),
            "unknown ratio_level 'sequence'; known: token, macro, macro_mean",
        ),
        (
            lambda: mk.macro_reduce(X, IDS, weights="mean", discount=0.9),
            "discount belongs to weights='discounted_sum' and has no meaning for 'mean'; leave it 1",
        ),
        (lambda: mk.macro_gae(X, X, IDS, gamma=1.5), "gamma must be at most 1, got 1.5"),
        (lambda: linear_loss(dual_clip=1.1), "dual_clip must be greater than 1 + clip_high = 1.2, got 1.1"),
        (lambda: linear_loss(vocab_group="world"), "vocab_group must be a process group or None, got str"),
        (
            lambda: linear_loss(kl_loss_coef=0.1),
            "kl_loss_coef needs ref_logprobs, the log-probabilities of the reference model",
        ),
        (
            lambda: mk.macro_lengths(IDS[0], cu_seqlens=CU, max_seqlen=torch.tensor(3)),
            "max_seqlen must be an int or None, got Tensor; a tensor would have to be read back from its device",
        ),
    ],
    ids=lambda x: x.partition(";")[0][:60] if isinstance(x, str) else "",
)
def test_messages(run, message, backend):
    """What is said, word for word: the argument, what is wrong with it, and what would be right."""
    if backend.device != "cpu" and " is on cpu" in message:
        message = message.replace("on cpu", f"on {backend.device}:0")
    with pytest.raises(BAD) as error:
        run()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda: mk.token_logprobs(LOGITS, LABELS + 5),
            "labels has the token id 5, but the vocabulary has 5 tokens",
        ),
        (
            lambda: mk.linear_token_logprobs(HIDDEN, WEIGHT, LABELS + 7),
            "labels has the token id 7, but the vocabulary has 5 tokens",
        ),
        (lambda: linear_loss(labels=LABELS + 7), "labels has the token id 7, but the vocabulary has 5 tokens"),
        (
            lambda: mk.token_logprobs(LOGITS, LABELS, temperature=X - 2),
            "temperature must be greater than 0, got -2",
        ),
        (
            lambda: mk.linear_token_logprobs(HIDDEN, WEIGHT, LABELS, temperature=torch.zeros(())),
            "temperature must be greater than 0, got 0",
        ),
        (
            lambda: mk.macro_lengths(IDS, num_macros=1),
            "macro_ids has id 1, but there is room for 1 macro actions only",
        ),
    ],
    ids=lambda x: x.partition(",")[0] if isinstance(x, str) else "",
)
def test_messages_about_what_stands_in_tensors(run, message, backend):
    """The same of what a CPU can read without waiting for anyone."""
    if backend.name == "gpu":
        pytest.skip("on a GPU it cannot be read without a host sync")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run()
    assert str(error.value) == message


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
        (lambda v: linear_loss(ratio_level=v), "ratio_level", oracle.RATIO_LEVELS),
        (lambda v: linear_loss(normalize_by=v), "normalize_by", oracle.NORMALIZE_BY),
        (
            lambda v: segmentation.perplexity(X.bool(), X, rule=v),
            "rule",
            ("running_mean", "neighbour"),
        ),
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
        ("macro_gae", {"gamma": -0.1}, "gamma"),
        ("macro_gae", {"lam": 1.1}, "lam"),
        ("rollout_advantages", {"gamma": 1.1}, "gamma"),
        ("rollout_advantages", {"lam": -0.1}, "lam"),
        ("macro_policy_loss", {"normalizer": -1.0}, "normalizer"),
        ("macro_value_loss", {"normalizer": -1.0}, "normalizer"),
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


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"old_logprobs": X[:, :2]}, r"old_logprobs has shape \[2, 2\]"),
        ({"advantages": X[0]}, r"advantages has shape \[3\]"),
        ({"advantages": X.long()}, "advantages.*int64"),
        ({"old_logprobs": X.to("meta")}, "old_logprobs is on meta"),
        ({"labels": LABELS[:, :2]}, r"labels has shape \[2, 2\]"),
        ({"labels": LABELS.to("meta")}, "labels is on meta"),
        ({"hidden": HIDDEN.to("meta")}, "labels is on .*, but hidden is on meta"),
        ({"bias": torch.zeros(5, device="meta")}, "bias is on meta"),
        ({"bias": torch.zeros(5).long()}, "bias.*int64"),
        ({"macro_ids": IDS.float()}, "macro_ids.*float32"),
        ({"macro_ids": IDS[0]}, "cu_seqlens"),
        ({"ref_logprobs": X[:, :2], "kl_loss_coef": 0.1}, r"ref_logprobs has shape \[2, 2\]"),
        ({"ref_logprobs": [0.0], "kl_loss_coef": 0.1}, "ref_logprobs.*list"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \[3\]"),
        ({"temperature": torch.ones(2, 3).long()}, "temperature.*int64"),
        ({"entropy_coef": None}, "entropy_coef.*NoneType"),
        ({"entropy_coef": math.inf}, "entropy_coef must be finite"),
        ({"kl_loss_coef": torch.ones(2), "ref_logprobs": X}, r"kl_loss_coef.*0-d"),
        ({"token_normalizer": -1}, "token_normalizer must be at least 0"),
        ({"normalizer": -1}, "normalizer must be at least 0"),
        ({"clip_low": -0.1}, "clip_low must be at least 0"),
        ({"clip_high": "0.2"}, "clip_high.*str"),
    ],
    ids=str,
)
def test_wrong_linear_loss(changes, match):
    """What linear_macro_policy_loss has beyond linear_token_logprobs: shapes, dtypes, devices and numbers, named."""
    linear_loss()
    with pytest.raises(BAD, match=match):
        linear_loss(**changes)


def test_dtensor_shards(sharded):
    """A DTensor is refused by name, with the way out: the shard alone would give a wrong number."""
    runs = [
        lambda: mk.token_logprobs(sharded(LOGITS), LABELS),
        lambda: mk.masked_whiten(sharded(X), X.bool()),
        lambda: segmentation.token(sharded(X.bool())),
        lambda: mk.macro_lengths(sharded(IDS)),
        lambda: mk.macro_broadcast(sharded(X), IDS),
        lambda: mk.macro_gae(X, X, IDS, bootstrap_values=sharded(ROW)),
        lambda: mk.macro_lengths(PACKED_IDS, cu_seqlens=sharded(CU)),
        lambda: mk.token_logprobs(LOGITS, sharded(LABELS)),
        lambda: mk.token_logprobs(LOGITS, LABELS, temperature=sharded(X + 1)),
        lambda: mk.masked_whiten(X, sharded(X.bool())),
        lambda: mk.linear_token_logprobs(sharded(HIDDEN), WEIGHT, LABELS),
        lambda: mk.linear_token_logprobs(HIDDEN, sharded(WEIGHT), LABELS),
        lambda: mk.linear_token_logprobs(HIDDEN, WEIGHT, LABELS, bias=sharded(WEIGHT[:, 0])),
        *(
            lambda name=name, x=x: linear_loss(**{name: sharded(x)})
            for name, x in (
                ("hidden", HIDDEN),
                ("weight", WEIGHT),
                ("labels", LABELS),
                ("old_logprobs", X),
                ("advantages", X),
                ("macro_ids", IDS),
            )
        ),
        lambda: segmentation.from_ends(X.bool(), sharded(X.bool())),
        lambda: segmentation.perplexity(X.bool(), sharded(X)),
        lambda: segmentation.from_lengths(X.bool(), sharded(LABELS)),
        lambda: segmentation.isolate_last(sharded(IDS)),
        lambda: segmentation.validate(sharded(IDS)),
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
