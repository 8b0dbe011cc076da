"""Builds the native CPU library with CMake; without a compiler the package installs without it.

The library has a plain C interface and links nothing of torch, so the build environment needs none.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LIBRARY = "marlhf_kernels.cpu.libmarlhf_cpu"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class CMakeBuild(build_ext):
    """Runs CMake and puts the shared library beside `marlhf_kernels/cpu/__init__.py`."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + SUFFIX

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        source = Path(__file__).resolve().parent
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S", str(source),
            "-B", str(build),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
        ]  # fmt: skip
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        reason_file = target.parent / "build_failure.txt"
        target.unlink(missing_ok=True)
        reason_file.unlink(missing_ok=True)
        try:
            subprocess.run(configure, check=True, capture_output=True, text=True)
            subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            self._without_library(reason_file, "cmake was not found")
        except subprocess.CalledProcessError as failure:
            self._without_library(reason_file, f"`{' '.join(failure.cmd[:2])} ...` failed: {_reason(failure)}")

    def copy_extensions_to_source(self) -> None:
        """Editable installs: the library, or the reason why there is none, goes into the source tree."""
        super().copy_extensions_to_source()
        for name in ("libmarlhf_cpu" + SUFFIX, "build_failure.txt"):
            built = Path(self.build_lib) / "marlhf_kernels" / "cpu" / name
            in_source = Path(__file__).resolve().parent / "marlhf_kernels" / "cpu" / name
            if built.exists():
                shutil.copy2(built, in_source)
            else:
                in_source.unlink(missing_ok=True)

    def _without_library(self, reason_file: Path, reason: str) -> None:
        # The loader reads this file and tells it in `marlhf_kernels.backends()`.
        reason_file.parent.mkdir(parents=True, exist_ok=True)
        reason_file.write_text(reason + "\n", encoding="utf-8")
        print(
            f"marlhf: the native CPU library was not built ({reason}); the PyTorch reference runs instead. "
            "Install a C++17 compiler and reinstall to get it.",
            file=sys.stderr,
        )


def _reason(failure: subprocess.CalledProcessError) -> str:
    """What went wrong in one line: CMake spreads a message over several, a compiler gives it in its first."""
    lines = [line.strip() for line in (failure.stderr + failure.stdout).splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):
            message = " ".join(lines[number : number + 4]).partition("Call Stack")[0]
            return message.rpartition("(message):")[2].strip()
        if "error:" in line:
            return line
    return lines[-1] if lines else f"exit status {failure.returncode}"


setup(ext_modules=[Extension(LIBRARY, sources=[], optional=True)], cmdclass={"build_ext": CMakeBuild})
