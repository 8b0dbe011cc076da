"""The packages stand on floors, and imports only go down."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import marlhf
import marlhf_kernels

ROOTS = {"marlhf": Path(marlhf.__file__).parent, "marlhf_kernels": Path(marlhf_kernels.__file__).parent}

FLOORS = {
    "marlhf": [
        {"__main__", "cli"},
        {"demo"},
        {"stages", "doctor"},
        {"rollout"},
        {"rewards", "report"},
        {
            "termination",
            "models",
            "data",
            "engine",
            "advantages",
            "checkpoint",
            "presets",
            "responses",
            "sampling",
            "user_code",
            "run_folder",
            "progress",
            "files",
            "config",
            "errors",
        },
    ],
    "marlhf_kernels": [
        {"segmentation"},
        {"ops"},
        {"gpu", "reference", "cpu"},
        {"backends", "checks"},
    ],
}
"""From the top down: packages and modules by their first name below the root."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted names and files, the package's own `__init__` included."""
    for file in sorted(ROOTS[package].rglob("*.py")):
        parts = file.relative_to(ROOTS[package]).with_suffix("").parts
        name = ".".join((package, *parts)).removesuffix(".__init__")
        yield name, file


def imports(file: Path, *, anywhere: bool = True) -> set[str]:
    """Dotted names that a file imports; with `anywhere` also those inside functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = set()
    nodes = list(ast.walk(tree)) if anywhere else list(top_level(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from top_level(node)


def floor(package: str, name: str) -> int:
    first = name.split(".")[1]
    return next(number for number, names in enumerate(FLOORS[package]) if first in names)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down(package: str) -> None:
    known = {name for name, _ in modules(package)}
    seen = 0
    for name, file in modules(package):
        if name == package:
            continue
        for imported in imports(file):
            target = imported if imported in known else imported.rpartition(".")[0]
            if target not in known or target == package:
                continue
            seen += 1
            assert floor(package, target) >= floor(package, name), f"{name} imports {target}, which stands above it"
    assert seen > 20


@pytest.mark.parametrize("package", FLOORS)
def test_no_module_imports_itself_by_a_detour(package: str) -> None:
    known = dict(modules(package))
    below = {
        name: {
            target
            for imported in imports(file, anywhere=False)
            for target in (imported, imported.rpartition(".")[0])
            if target in known and target != name
        }
        for name, file in known.items()
    }
    # The root of a package gathers names from below; importing a submodule runs it first either way.
    below = {name: {target for target in targets if target != package} for name, targets in below.items()}
    while free := [name for name, targets in below.items() if not targets & below.keys()]:
        for name in free:
            del below[name]
    packages = {name for name in below if known[name].name == "__init__.py"}
    rest = {name: targets & below.keys() - packages for name, targets in below.items() if name not in packages}
    while free := [name for name, targets in rest.items() if not targets & rest.keys()]:
        for name in free:
            del rest[name]
    assert rest == {}


def test_the_kernels_know_nothing_of_the_trainer() -> None:
    for name, file in modules("marlhf_kernels"):
        assert not any(imported.split(".")[0] == "marlhf" for imported in imports(file)), name


def test_the_backends_do_not_know_each_other() -> None:
    backends = {"gpu", "reference", "cpu"}
    for name, file in modules("marlhf_kernels"):
        own = {name.split(".")[1]} if "." in name else set()
        if not own & backends:
            continue
        others = {f"marlhf_kernels.{other}" for other in backends - own}
        for imported in imports(file):
            assert not any(imported == other or imported.startswith(f"{other}.") for other in others), name


def test_the_kernels_import_torch_alone() -> None:
    """Of what is not Python's own; Triton only in the GPU backend or once a function asks for it, NumPy nowhere."""
    allowed = {*sys.stdlib_module_names, "torch", "marlhf_kernels"}
    for name, file in modules("marlhf_kernels"):
        triton = {"triton"} if name.startswith("marlhf_kernels.gpu") else set()
        assert {imported.split(".")[0] for imported in imports(file, anywhere=False)} <= allowed | triton, name
        assert {imported.split(".")[0] for imported in imports(file)} <= allowed | {"triton"}, name


def test_importing_the_kernels_loads_nothing_but_torch() -> None:
    """Beyond what importing torch loads by itself."""
    program = (
        "import sys, torch; before = set(sys.modules); import marlhf_kernels\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOTS["marlhf_kernels"].parent,
        check=True,
    )
    loaded = set(run.stdout.split())
    assert "marlhf_kernels" in loaded
    assert loaded <= {*sys.stdlib_module_names, "torch", "marlhf_kernels"}


def test_the_command_line_starts_with_the_standard_library() -> None:
    """So that a missing package is told as a sentence, and Ctrl-C is answered from the first moment."""
    for module in ("__init__", "__main__", "cli", "errors"):
        names = {name.split(".")[0] for name in imports(ROOTS["marlhf"] / f"{module}.py", anywhere=False)}
        assert names <= {*sys.stdlib_module_names, "marlhf"}, module
