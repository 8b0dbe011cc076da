"""The native library built with the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import random_calls

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZERS = "address,undefined"
EDGES = ("macro", "advantages", "policy_loss", "value_loss", "segmentation", "whiten", "token_logprobs", "cpu_macro")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """A copy of the packages and tests whose native library is built with sanitizers; runs Python there."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    for name in ("marlhf_kernels", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.dylib"))
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    build = ["cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release", f"-DMARLHF_SANITIZE={SANITIZERS}"]
    build.append(f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / 'marlhf_kernels' / 'cpu'}")
    for command in (build, ["cmake", "--build", "build"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    # The sanitizer looks for the function that throws when it starts, before Python has loaded a C++ library.
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(found),
        # Python itself never frees all; a child of a fork is another process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.slow
def test_the_sanitizers_are_awake(sanitized):
    """A call that is told of more logits than there are is caught."""
    code = (
        "import torch, marlhf_kernels as mk; from marlhf_kernels.cpu import logprobs; x = torch.zeros(1, 5000);"
        "logprobs._FORWARD = type('F', (), {'call': staticmethod(lambda *a, f=logprobs._FORWARD.call:"
        " f(*a[:3], 9000, a[4], 9000, *a[6:]))});"
        "mk.use_backend('cpu').__enter__(); mk.token_logprobs(x, torch.tensor([0]))"
    )
    done = sanitized("-c", code)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_edge_cases(sanitized):
    """The tests of every op, and of ids that are garbage."""
    files = [f"tests/kernels/test_{name}.py" for name in EDGES]
    done = sanitized("-m", "pytest", "-q", "-x", *files, "--backend", "cpu", "-m", "not slow and not long",
                     "-p", "no:cacheprovider", "-p", "no:xdist")  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_calls(sanitized):
    """Some thousand calls of every op; `python -m tests.kernels.random_calls` sends any number."""
    done = sanitized("-m", "tests.kernels.random_calls", "--calls", str(1500 * len(random_calls.available())))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    print(done.stdout)
