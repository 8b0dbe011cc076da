"""What only the native CPU backend has to show: instruction sets, threads, forks, and what the library needs."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import marlhf_kernels as mk
from marlhf_kernels import cpu
from marlhf_kernels.cpu import loader
from marlhf_kernels.cpu.loader import Function
from tests.cases.batches import upstream
from tests.cases.compare import assert_same_bits
from tests.cases.logits import CASES
from tests.cases.precision import widest
from tests.kernels import test_token_logprobs as bench

LIBRARY = str(loader.LIBRARY)
pytestmark = pytest.mark.skipif(not loader.LIBRARY.exists(), reason="the native library is not built")


def run(code, **environment):
    """Runs code in a fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def threads(number):
    """Native loops run on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def usable_sets():
    """The instruction sets that this processor has."""
    bits = loader.library().marlhf_instruction_sets() if loader.LIBRARY.exists() else 0
    return [name for bit, name in enumerate(loader.INSTRUCTION_SETS) if bits >> bit & 1]


def forget():
    """What was chosen for the process is chosen anew when it is next needed."""
    loader.instruction_set.cache_clear()
    loader.missing.cache_clear()
    for module in vars(cpu).values():
        for value in list(getattr(module, "__dict__", {}).values()):
            if isinstance(value, Function):
                vars(value).pop("call", None)


@pytest.fixture
def asked(monkeypatch):
    """Asks for an instruction set by the environment variable."""

    def ask(name):
        monkeypatch.setenv(loader.VARIABLE, name)
        forget()

    yield ask
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("name", usable_sets())
def test_every_instruction_set_keeps_the_budget(name, asked):
    """All logit cases in the three dtypes: values and gradients within the error budget of the loop oracle."""
    asked(name)
    with mk.use_backend("cpu"), widest(torch.float32):
        for case in CASES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                bench.test_oracle(case, dtype)
    assert loader.instruction_set() == name


@pytest.mark.parametrize("name", usable_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_read_and_rounded_as_torch_does(name, dtype, asked):
    """All 65536 bit patterns as logits, gradients from below the smallest number to above the largest: the float32
    gradient of the raised logits, rounded by torch, has the same bits."""
    asked(name)
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, -1)
    # bfloat16 reaches 3e38, where exp overflows whatever is saved.
    x = torch.where(x.isfinite() & (x.abs() < 70000), x, torch.tensor(math.nan, dtype=dtype))
    saved = (torch.zeros(1), torch.zeros(1), torch.full((1,), 0.5))
    for scale in (1e-38, 1e-7, 1e-4, 1.0, 3e4):
        g, h = torch.tensor([scale]), torch.tensor([scale])
        rest = (torch.tensor([7]), torch.tensor(2048.0), None, *saved)
        with mk.use_backend("cpu"):
            got = torch.ops.marlhf.token_logprobs_backward(g, h, x, *rest)
            want = torch.ops.marlhf.token_logprobs_backward(g, h, x.float(), *rest).to(dtype)
        assert_same_bits(got, want, f"scale {scale}")
        assert got.isfinite().sum() > 30000 or scale == 3e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 200_003), (20, 40_000), (70_001, 5), (3, 128)])
def test_the_bits_do_not_depend_on_the_number_of_threads(rows, vocabulary, dtype):
    """Few long rows, many short ones: 1, 2 and 3 threads give the same bits, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(rows, vocabulary).mul_(4).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,))
    results = []
    for number in (1, 2, 3):
        with threads(number), mk.use_backend("cpu"):
            out = mk.token_logprobs(x, labels, return_entropy=True)
            (gradient,) = torch.autograd.grad(out, x, [upstream(out[0], 1), upstream(out[1], 2)])
        results.append((*out, gradient))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


PROCESS = """
import json, os, torch, marlhf_kernels as mk
tasks = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
x, y = torch.zeros(8, 65536), torch.arange(8)
small = torch.full((100000,), 1e-40)
counts = [tasks()]
with mk.use_backend("cpu"):
    for threads in (1, 3):
        torch.set_num_threads(threads)
        mk.token_logprobs(x, y)
        counts.append(tasks())
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
print(json.dumps({
    "threads": [b - a for a, b in zip(counts, counts[1:])],
    "runtimes": sum("omp" in path and ".so" in path for path in mapped),
    "kept": bool((small * 1 == small).all() and (small > 0).all()),
}))
"""


@pytest.fixture(scope="module")
def process():
    """What a process looks like from outside after calls on one thread and on three."""
    if not Path("/proc/self/task").exists():
        pytest.skip("the system does not list a process's threads")
    return json.loads(run(PROCESS))


def test_loops_run_on_the_threads_that_torch_is_told(process):
    """With one thread a call starts none, with 3 it starts 2 more."""
    assert process["threads"] == [0, 2]


def test_one_openmp_runtime(process):
    """The library uses torch's: the process maps one."""
    assert process["runtimes"] == 1


def test_small_numbers_are_not_flushed_to_zero(process):
    """1e-40 * 1 stays 1e-40 after the library is loaded and called."""
    assert process["kept"]


FORK = """
import os, sys, torch, marlhf_kernels as mk
torch.set_num_threads(2)
x, y = torch.randn(8, 65536), torch.arange(8)
mk.use_backend("cpu").__enter__()
def call():
    leaf = x.clone().requires_grad_()
    mk.token_logprobs(leaf, y).sum().backward()
    return leaf.grad
before = call()
child = os.fork()
if child == 0:
    # Only native calls: torch's own loops would wait for the threads that the fork did not copy.
    one = torch.tensor(1.0)
    _, entropy, *saved = torch.ops.marlhf.token_logprobs(x, y, one, None, False, False)
    gradient = torch.ops.marlhf.token_logprobs_backward(torch.ones(8), None, x, y, one, None, *saved, entropy)
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(gradient, before) else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), torch.equal(call(), before))
"""


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks():
    """After an op ran on two threads a forked child runs it too, with the same bits, and the parent still can."""
    assert run(FORK) == "0 True"


WORKER = """
import torch, marlhf_kernels as mk
torch.set_num_threads(2)
x, y = torch.zeros(8, 65536), torch.arange(8)
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        torch.set_num_threads(2)
        return mk.token_logprobs(x, y)
mk.token_logprobs(x, y)
print(len(list(torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))))
"""


def test_a_data_loader_worker_calls_an_op():
    """Also where the worker asks torch for two threads."""
    assert run(WORKER, MARLHF_BACKEND="cpu") == "2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 2])
def test_in_place_backward_writes_its_own_columns_alone(dtype, step):
    """Widths around every vector length inside a wider buffer: what is beside them keeps its bits."""
    torch.manual_seed(0)
    for width in (*range(1, 36), 63, 64, 65):
        buffer = torch.randn(3, width * step + 7).to(dtype)
        untouched = torch.ones_like(buffer, dtype=torch.bool)
        inner = slice(3, 3 + width * step, step)
        untouched[:, inner] = False
        before, logits = buffer.clone(), buffer[:, inner]
        labels = torch.tensor([0, -1, width - 1])
        with mk.use_backend("cpu"):
            out = torch.ops.marlhf.token_logprobs(logits, labels, torch.tensor(1.0), None, False, True)
            args = (labels, torch.tensor(1.0), None, *out[2:], out[1])
            want = torch.ops.marlhf.token_logprobs_backward(torch.ones(3), None, logits, *args)
            torch.ops.marlhf.token_logprobs_backward_(logits, torch.ones(3), None, *args)
        assert_same_bits(logits, want)
        assert_same_bits(buffer[untouched], before[untouched])


def test_unknown_instruction_set(asked):
    """A name that is none is told with the known ones; the reference runs with one warning."""
    asked("mmx")
    reason = mk.backends()["cpu"].reason
    assert re.search(r"MARLHF_CPU_ISA.*'mmx'.*baseline, avx2, avx512", reason)
    with pytest.raises(mk.BackendUnavailableError, match="mmx"), mk.use_backend("cpu"):
        pass
    sys.modules["marlhf_kernels.backends"]._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert mk.token_logprobs(torch.zeros(1, 4), torch.tensor([2])).item() == pytest.approx(-math.log(4))
    assert [str(w.message).count("mmx") for w in told] == [1]


def test_instruction_set_that_the_processor_lacks(asked, monkeypatch):
    """Asking for what this processor cannot run names what it can."""

    class Library:
        @staticmethod
        def marlhf_instruction_sets():
            return 0b011

    monkeypatch.setattr(loader, "library", Library)
    asked("avx512")
    assert mk.backends()["cpu"].reason == "MARLHF_CPU_ISA: this processor has no avx512; it has: baseline, avx2"
    asked("")
    assert loader.instruction_set() == "avx2"


def tool(name, *args):
    """What a program of binutils says of the library."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *args, LIBRARY], capture_output=True, text=True, check=True).stdout


def test_the_library_needs_the_c_library_alone():
    """No torch, Python, C++ or OpenMP library is named, and every symbol it cannot do without is the C library's."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", tool("readelf", "-dW"))
    assert {name.partition(".so")[0] for name in needed} <= {"libc", "libm"}
    symbols = tool("nm", "-D", "--undefined-only").split("\n")
    strong = [line.split()[-1] for line in symbols if re.search(r"\bU\b", line)]
    assert strong, symbols
    assert all("@GLIBC_" in name for name in strong)
    assert any("GOMP_parallel" in line for line in symbols)


def test_what_every_processor_runs_has_no_vector_extension():
    """Functions outside of the avx2 and avx512 namespaces use none of their registers or encodings."""
    if "avx2" not in usable_sets():
        pytest.skip("the other instruction sets are compiled for x86-64 alone")
    checked = 0
    for function in tool("objdump", "-d", "--no-show-raw-insn").split("\n\n"):
        name, _, body = function.strip().partition(":\n")
        if "avx2" in name or "avx512" in name or not name.endswith(">"):
            continue
        checked += "baseline" in name
        found = re.search(r".*(%[yz]mm|\tv[a-z0-9]+ .*%xmm).*", body)
        assert found is None, f"{name}: {found[0]}"
    assert checked > 10


def pythons():
    """The Python 3 interpreters of this machine that start."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if "shims" not in folder]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True).stdout.strip()
        folders += sorted(Path(root).glob("versions/3*/bin"))
    found = {path.resolve() for folder in folders for path in folder.glob("python3*")}
    return sorted({str(path) for path in found if re.fullmatch(r"python3(\.\d+)?", path.name)} | {sys.executable})


CALL = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)
assert library.marlhf_instruction_sets() & 1
x, out = (ctypes.c_float * 4)(), (ctypes.c_float * 4)()
labels, partials = (ctypes.c_int64 * 1)(2), (ctypes.c_double * 3)()
at = lambda array, i=0: ctypes.c_void_p(ctypes.addressof(array) + 4 * i)
n, d = ctypes.c_int64, ctypes.c_double
status = library.marlhf_baseline_token_logprobs(
    0, at(x), None, n(4), n(1), n(4), 4, at(labels), None, d(1), d(float("inf")), at(partials),
    at(out), at(out, 1), at(out, 2), at(out, 3), 2)
print(status, round(out[0], 5), round(out[1], 5))
"""


@pytest.mark.parametrize("python", pythons() if loader.LIBRARY.exists() else [])
def test_loads_under_every_python_without_torch(python):
    """With all symbols bound at once; without an OpenMP runtime in the process the loops run serially."""
    done = subprocess.run([python, "-I", "-c", CALL, LIBRARY], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == f"0 {-math.log(4):.5f} {math.log(4):.5f}", done.stderr


def test_the_loader_numbers_types_as_the_library_does():
    """`loader.TYPES` against `enum Type`."""
    header = (loader.FOLDER / "api.h").read_text(encoding="utf-8")
    names = re.search(r"enum Type : int \{(.*)\}", header)[1]
    numbers = {name.lower(): int(number) for name, number in re.findall(r"(\w+) = (\d+)", names)}
    assert {str(dtype).removeprefix("torch."): number for dtype, number in loader.TYPES.items()} == numbers


def test_a_segment_is_as_long_in_python_as_in_the_library():
    """Python allots room for the partial sums of each segment."""
    source = (loader.FOLDER / "logprobs.cpp").read_text(encoding="utf-8")
    assert re.search(r"SEGMENT = (\d+);", source)[1] == str(cpu.logprobs.SEGMENT)
