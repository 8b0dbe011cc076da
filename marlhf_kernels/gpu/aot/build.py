"""From launches to machine code and its needs."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from marlhf_kernels.gpu.aot.case import Case
from marlhf_kernels.gpu.launch import intercepted, options_of

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = 48 * 1024

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Specialization:
    """All that a compilation depends on: equal ones are compiled once in a process."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    """Positions of the arguments whose address the compiler knows to be a multiple of 16 bytes."""
    num_warps: int
    max_registers: int | None


@dataclass(frozen=True)
class Needs:
    """What a compiled kernel takes of its target."""

    kernel: str
    num_warps: int
    registers: int
    spilled: int
    """Bytes of stack a thread (NVIDIA), or vector registers (AMD)."""
    shared: int
    load_bits: int
    """The widest load from global memory."""
    float64: bool

    def excess(self, case: Case) -> list[str]:
        """What breaks a limit, in words."""
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled}")
        if self.registers > case.registers:
            found.append(f"takes {self.registers} registers a thread, {case.registers} allowed")
        if self.shared > SHARED_LIMIT:
            found.append(f"takes {self.shared} bytes of shared memory, {SHARED_LIMIT} allowed")
        if self.float64:
            found.append("computes in float64")
        return [f"{self.kernel} {words}" for words in found]


def vector_bits(target: str) -> int:
    """Of a load that is wide enough: each of the 64 lanes of AMD's waves need load only half as much as one of 32."""
    return 64 if target.startswith("gfx") else 128


def specializations(run: Callable[[], object]) -> list[Specialization]:
    """One for each launch that `run` makes, in order."""
    found: list[Specialization] = []

    def note(
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        num_warps: int,
        max_registers: int | None,
        constexprs: dict[str, Any],
    ) -> None:
        found.append(_specialize(kernel, args, num_warps, max_registers, constexprs))

    with intercepted(note):
        run()
    return found


def _specialize(
    kernel: Any, args: tuple[Any, ...], num_warps: int, max_registers: int | None, constexprs: dict[str, Any]
) -> Specialization:
    signature, constants, aligned = [], dict(constexprs), []
    positional = iter(args)
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature.append((name, "constexpr"))
            continue
        value = next(positional)
        if value is None:
            signature.append((name, "constexpr"))
            constants[name] = None
        elif isinstance(value, Tensor):
            signature.append((name, "*" + _TYPES[value.dtype]))
            if not parameter.do_not_specialize and value.data_ptr() % 16 == 0:
                aligned.append(position)
        elif isinstance(value, float):
            signature.append((name, "fp32"))
        else:
            if not parameter.do_not_specialize:
                raise TypeError(f"{kernel.__name__} would compile anew for values of {name}: mark it do_not_specialize")
            signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
    return Specialization(
        kernel, tuple(signature), tuple(sorted(constants.items())), tuple(aligned), num_warps, max_registers
    )


@functools.cache
def compile_for(target: str, which: Specialization) -> Needs:
    """Compile for a target by name, such as `sm_90` or `gfx942`."""
    amd = target.startswith("gfx")
    where = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    names = [name for name, _ in which.signature]
    compiled = triton.compile(
        ASTSource(
            which.kernel,
            signature=dict(which.signature),
            constexprs={(names.index(name),): value for name, value in which.constexprs},
            attrs={(position,): [["tt.divisibility", 16]] for position in which.aligned},
        ),
        target=where,
        options=options_of(which.num_warps, which.max_registers, amd),
    )
    registers, spilled, load_bits, float64 = (
        _read_amd(compiled.asm["amdgcn"]) if amd else _read_nvidia(compiled.asm["ptx"], compiled.asm["cubin"])
    )
    return Needs(
        which.kernel.__name__, which.num_warps, registers, spilled, compiled.metadata.shared, load_bits, float64
    )


def _read_nvidia(ptx: str, cubin: bytes) -> tuple[int, int, int, bool]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(_only(rf"{word}:(\d+)", usage)) for word in ("REG", "STACK"))
    widths = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    load_bits = max((int(count or 1) * int(bits) for count, bits in widths), default=0)
    return registers, stack, load_bits, ".f64" in ptx


def _read_amd(text: str) -> tuple[int, int, int, bool]:
    registers, spilled = (int(_only(rf"\.{word}:\s+(\d+)", text)) for word in ("vgpr_count", "vgpr_spill_count"))
    words = re.findall(r"(?:global|buffer)_load_(?:u?byte|[su]?short|[bu](\d+)|dwordx?(\d*))", text)
    load_bits = max((int(bits) if bits else 32 * int(count or 1) for bits, count in words), default=0)
    return registers, spilled, load_bits, re.search(r"\bv_\w+_f64", text) is not None


def _only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return str(found)
