"""backends(), use_backend, MARLHF_BACKEND: which implementation runs, and what is said when it cannot."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels.backends import select
from tests.cases.shapes import GRIDS
from tests.conftest import NAMES, _select_or_skip, known_backend

X = torch.tensor([[1.0, 2.0]])
IDS = torch.tensor([[0, 0]], dtype=torch.int32)


# The ops that each backend claims, by their name in torch.ops.marlhf. A backend that gains an op adds it here in the
# same commit; one that loses an op goes red here, where the tests of that op would only be skipped.
CLAIMED = {
    "reference": {
        "action_labels",
        "fixed_ngram",
        "from_bounds",
        "from_ends",
        "isolate_last",
        "kl_penalized_rewards",
        "linear_token_logprobs",
        "linear_token_logprobs_backward",
        "macro_broadcast",
        "macro_gae",
        "macro_lengths",
        "macro_policy_loss",
        "macro_reduce",
        "macro_reduce_backward",
        "macro_value_loss",
        "masked_moments",
        "masked_normalize",
        "merge_slices",
        "perplexity",
        "policy_penalty",
        "rollout_advantages",
        "scale_gradient",
        "token_logprobs",
        "token_logprobs_backward",
        "token_logprobs_backward_",
    },
    "cpu": {
        "action_labels",
        "fixed_ngram",
        "from_bounds",
        "from_ends",
        "isolate_last",
        "kl_penalized_rewards",
        "macro_broadcast",
        "macro_gae",
        "macro_lengths",
        "macro_policy_loss",
        "macro_reduce",
        "macro_reduce_backward",
        "macro_value_loss",
        "masked_moments",
        "masked_normalize",
        "perplexity",
        "policy_penalty",
        "rollout_advantages",
        "scale_gradient",
        "token_logprobs",
        "token_logprobs_backward",
        "token_logprobs_backward_",
    },
    "gpu": {
        "action_labels",
        "fixed_ngram",
        "from_bounds",
        "from_ends",
        "isolate_last",
        "kl_penalized_rewards",
        "macro_broadcast",
        "macro_gae",
        "macro_lengths",
        "macro_policy_loss",
        "macro_reduce",
        "macro_reduce_backward",
        "macro_value_loss",
        "masked_moments",
        "masked_normalize",
        "perplexity",
        "policy_penalty",
        "rollout_advantages",
        "scale_gradient",
        "token_logprobs",
        "token_logprobs_backward",
        "token_logprobs_backward_",
    },
}


def python(code, **environment):
    """Runs code in a fresh interpreter; its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def unavailable():
    """A backend that this machine cannot run, or None."""
    return next((name for name, status in mk.backends().items() if not status.available), None)


def test_report():
    """backends() names the three with a reason each; the reference is always there."""
    report = mk.backends()
    assert list(report) == ["reference", "cpu", "gpu"]
    assert report["reference"].available
    for status in report.values():
        assert isinstance(status.available, bool)
        assert status.available or status.reason


@pytest.mark.parametrize("name", CLAIMED)
def test_claimed_ops(name):
    """Each backend has exactly the ops that are claimed for it, on machines that cannot run it too."""
    assert set(mk.backends()[name].ops) == CLAIMED[name]


def test_the_reference_has_every_op():
    """Whatever is registered as an op has a definition."""
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "marlhf::" in name}
    assert registered == CLAIMED["reference"]


def test_a_missing_op_skips_the_test():
    """It is no error that a test could be waiting for; an op that is there is the backend's own."""
    choose = _select_or_skip("reference")
    with mk.use_backend("reference"):
        with pytest.raises(pytest.skip.Exception, match="reference backend has no macro_product"):
            choose("macro_product", (X,))
        assert choose("macro_reduce", (X,)) is select("macro_reduce", (X,))
    assert not issubclass(pytest.skip.Exception, Exception)


def test_every_backend_takes_named_grids():
    """Each takes the interpreter's sizes at least, and none a size that has no name."""
    for name in NAMES:
        assert "interpreter" in known_backend(name).grids
        assert set(known_backend(name).grids) <= set(GRIDS)


def test_reference_can_be_asked_for():
    """use_backend("reference") and the variable give the reference's result."""
    with mk.use_backend("reference"):
        assert mk.macro_reduce(X, IDS).item() == 3.0
    assert mk.macro_reduce(X, IDS).item() == 3.0


def test_unknown_name():
    """An unknown name is refused, with the known ones."""
    with pytest.raises(ValueError, match=r"cuda.*reference.*cpu.*gpu"), mk.use_backend("cuda"):
        pass


def test_asking_for_what_cannot_run():
    """A backend that cannot run here is an error that says why."""
    name = unavailable()
    if name is None:
        pytest.skip("every backend can run on this machine")
    reason = mk.backends()[name].reason
    with pytest.raises(RuntimeError) as error, mk.use_backend(name):
        mk.macro_reduce(X, IDS)
    assert reason.splitlines()[0][:30] in str(error.value)
    assert name in str(error.value)


def test_the_variable_is_read_when_an_op_runs(monkeypatch):
    """MARLHF_BACKEND set after the import counts; the `with` block wins over it; an unknown name is refused."""
    monkeypatch.setenv("MARLHF_BACKEND", "reference")
    assert mk.macro_reduce(X, IDS).item() == 3.0
    monkeypatch.setenv("MARLHF_BACKEND", "tensorcore")
    with pytest.raises(ValueError, match=r"MARLHF_BACKEND.*tensorcore.*reference"):
        mk.macro_reduce(X, IDS)
    with mk.use_backend("reference"):
        assert mk.macro_reduce(X, IDS).item() == 3.0
    monkeypatch.setenv("MARLHF_BACKEND", "")
    assert mk.macro_reduce(X, IDS).item() == 3.0


def test_the_variable_and_what_cannot_run(monkeypatch):
    """The variable naming a backend that cannot run is an error when an op runs."""
    name = unavailable()
    if name is None:
        pytest.skip("every backend can run on this machine")
    monkeypatch.setenv("MARLHF_BACKEND", name)
    with pytest.raises(RuntimeError, match=name):
        mk.macro_reduce(X, IDS)


def test_blocks_nest_and_end(monkeypatch):
    """Leaving a block, also by an exception, restores what was asked before."""
    monkeypatch.setenv("MARLHF_BACKEND", "tensorcore")
    with mk.use_backend("reference"):
        with pytest.raises(KeyError), mk.use_backend("reference"):
            raise KeyError
        mk.macro_reduce(X, IDS)
    with pytest.raises(ValueError, match="tensorcore"):
        mk.macro_reduce(X, IDS)


def test_a_block_holds_for_its_thread(monkeypatch):
    """Another thread does not see the block."""
    monkeypatch.setenv("MARLHF_BACKEND", "tensorcore")
    caught = []

    def work():
        try:
            mk.macro_reduce(X, IDS)
        except ValueError as error:
            caught.append(error)

    with mk.use_backend("reference"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_backward_after_the_block(monkeypatch):
    """A backward outside of the block runs on the backend of its forward."""
    x = X.clone().requires_grad_()
    with mk.use_backend("reference"):
        out = mk.macro_reduce(x, IDS, weights="mean")
    out.sum().backward()
    assert x.grad.tolist() == [[0.5, 0.5]]


def test_import_needs_torch_alone():
    """Importing loads neither Triton, transformers, numpy's users nor the trainer."""
    code = (
        "import sys, torch; before = set(sys.modules); import marlhf_kernels; new = set(sys.modules) - before;"
        "print(sorted({m.split('.')[0] for m in new} & {'triton', 'transformers', 'marlhf', 'numpy', 'datasets'}))"
    )
    assert python(code) == "[]"


def test_import_is_quick():
    """Under 2 seconds beyond torch's own time."""
    code = (
        "import torch, torch.distributed, time; t = time.perf_counter(); import marlhf_kernels;"
        "print(time.perf_counter() - t)"
    )
    assert float(python(code)) < 2.0


def test_import_touches_no_global_state():
    """Threads, default dtype, determinism and the random state are the user's."""
    code = (
        "import torch; torch.manual_seed(3); s = torch.get_rng_state();"
        "a = (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled());"
        "import marlhf_kernels;"
        "b = (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled());"
        "print(a == b and torch.equal(s, torch.get_rng_state()))"
    )
    assert python(code) == "True"


def test_random_state_is_left_alone():
    """No op draws from the global generator."""
    state = torch.get_rng_state()
    mk.macro_reduce(X, IDS)
    mk.token_logprobs(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(state, torch.get_rng_state())


def test_public_names():
    """What `__all__` says is there, and every op of the surface is among it."""
    for name in mk.__all__:
        assert hasattr(mk, name)
    assert set(mk.__all__) >= {
        "backends", "kl_penalized_rewards", "macro_broadcast", "macro_gae", "macro_lengths", "macro_policy_loss",
        "macro_reduce", "macro_value_loss", "masked_whiten", "rollout_advantages", "segmentation", "token_logprobs",
        "use_backend",
    }  # fmt: skip
