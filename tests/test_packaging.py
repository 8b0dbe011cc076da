"""The package as a user installs it: torch alone beside it, with a compiler and without one."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Every op of the pipeline runs once in the bare environment, and prints what `import` cost and brought in.
EVERY_OP = """
import sys, time
import torch
start = time.perf_counter()
import marlhf_kernels as m
seconds = time.perf_counter() - start
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"triton", "transformers", "numpy", "marlhf"}, loaded
mask = torch.ones(2, 7, dtype=torch.bool)
for ids in (m.segmentation.fixed_ngram(mask, 3), m.segmentation.token(mask), m.segmentation.whole(mask)):
    logits = torch.randn(2, 7, 11, requires_grad=True)
    logprobs, entropy = m.token_logprobs(logits, torch.randint(11, (2, 7)), return_entropy=True)
    old, values = logprobs.detach(), torch.randn(2, 7, requires_grad=True)
    assert m.macro_lengths(ids).sum() == 14
    assert m.macro_broadcast(m.macro_reduce(old, ids), ids).shape == (2, 7)
    rewards = m.kl_penalized_rewards(torch.randn(2), old, old, ids, kl_coef=0.1)[0]
    m.macro_gae(rewards, values.detach(), ids)
    rollout = m.rollout_advantages(torch.randn(2), old, old, values.detach(), ids, kl_coef=0.1)
    advantages = m.masked_whiten(rollout.advantages, mask)
    policy = m.macro_policy_loss(logprobs, old, advantages, ids)
    value = m.macro_value_loss(values, values.detach(), rollout.returns, ids)
    (policy.loss + value.loss + entropy.sum()).backward()
    assert logits.grad.isfinite().all() and values.grad.isfinite().all()
print("seconds", seconds)
print("cpu backend:", m.backends()["cpu"].available, m.backends()["cpu"].reason)
"""


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with torch and nothing else, and its interpreter."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "-c", str(ROOT / "constraints.txt"), "torch==2.13.0", cwd=folder)
    return python


def source_copy(folder: Path) -> Path:
    """The tracked files alone: a build there neither sees nor leaves anything of the checkout's."""
    copy = folder / "source"
    copy.mkdir()
    files = run("git", "ls-files", cwd=ROOT).split()
    for name in files:
        source = ROOT / name
        if source.is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(source.read_bytes())
    return copy


@pytest.mark.slow
def test_with_torch_alone_every_op_runs_and_the_native_library_is_there(bare: Path, tmp_path: Path) -> None:
    source = source_copy(tmp_path)
    run(str(bare), "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(source), cwd=tmp_path)
    installed = run(str(bare), "-m", "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    assert "triton" not in installed
    assert "transformers" not in installed
    told = run(str(bare), "-c", EVERY_OP, cwd=tmp_path)
    assert "cpu backend: True" in told
    assert float(told.split("seconds ")[1].split()[0]) < 2.0
    # The command says what is missing instead of a traceback.
    command = subprocess.run(
        [str(bare), "-m", "marlhf", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert command.returncode != 0
    assert "pip install 'marlhf[train]'" in command.stderr
    assert "Traceback" not in command.stderr


@pytest.mark.slow
def test_without_a_compiler_the_install_works_and_says_what_is_missing(bare: Path, tmp_path: Path) -> None:
    source = source_copy(tmp_path)
    told = run(
        str(bare), "-m", "pip", "install", "-v", "--no-deps", "--force-reinstall", str(source),
        cwd=tmp_path,
        env={"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"},
    )  # fmt: skip
    assert "the native CPU library was not built" in told
    told = run(str(bare), "-c", EVERY_OP, cwd=tmp_path)
    assert "cpu backend: False" in told
    assert "compiler" in told.lower()


def test_importing_the_kernels_loads_nothing_of_the_trainer() -> None:
    code = "import sys, marlhf_kernels; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = run(sys.executable, "-c", code, cwd=ROOT)
    for name in ("triton", "transformers", "omegaconf", "marlhf"):
        assert f"'{name}'" not in loaded
