"""`python -m marlhf_kernels.gpu.aot` prints what every shipped kernel takes; exit status 1 where that is too much."""

from __future__ import annotations

import argparse
import sys

import triton

from marlhf_kernels.gpu.aot.build import TARGETS, compile_for, specializations
from marlhf_kernels.gpu.aot.cases import ALL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m marlhf_kernels.gpu.aot")
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas; default: %(default)s")
    parser.add_argument("--op", help="only the cases of this op")
    parser.add_argument("--quick", action="store_true", help="only the few cases that stand for the others")
    options = parser.parse_args()
    cases = [case for case in ALL if options.op in (None, case.op) and (case.quick or not options.quick)]
    if not cases:
        parser.error(f"no case of {options.op!r}; known: {', '.join(sorted({case.op for case in ALL}))}")
    print(f"Triton {triton.__version__}\n")
    print("| op | case | kernel | target | warps | registers | spilled | shared | load bits | float64 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    excess = []
    for case in cases:
        for which in specializations(case.run):
            for target in options.targets.split(","):
                needs = compile_for(target, which)
                cells = (
                    case.op, case.name, needs.kernel, target, needs.num_warps, needs.registers, needs.spilled,
                    needs.shared, needs.load_bits, "yes" if needs.float64 else "no",
                )  # fmt: skip
                print("|" + "|".join(f" {cell} " for cell in cells) + "|", flush=True)
                excess += [f"{case}, {target}: {words}" for words in needs.excess(case)]
    print(*("", *excess), sep="\n", file=sys.stderr)
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
