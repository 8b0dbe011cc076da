"""The command line: one command per stage over one YAML, overridden by `section.key=value` words."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

# The packages of the `train` extra are imported inside functions, so that a missing one is told as a sentence.
EXTRA = "the trainer needs the packages of its extra: pip install 'marlhf[train]'"


def main() -> None:
    """Entry point of the `marlhf` command."""
    # OpenMP's threads spin while they wait, which makes a step several times slower as soon as another process
    # wants a core; spinning for some ten microseconds keeps most of its use. Read once, when PyTorch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import typer
    except ImportError:
        sys.exit(f"marlhf: {EXTRA}")
    app = typer.Typer(
        help="SFT, reward model, and PPO or macro-action PPO from one YAML file.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    config_option = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with a section per stage.")]
    overrides_argument = Annotated[
        list[str] | None, typer.Argument(help="Overrides such as ppo.iterations=20.", show_default=False)
    ]

    def stage_command(name: str, help_text: str, module: str, function: str) -> None:
        @app.command(name, help=help_text)
        def command(overrides: overrides_argument = None, config: config_option = None) -> None:  # type: ignore[valid-type]
            run(module, function, config, overrides or [])

    def training_command(name: str, help_text: str, module: str, function: str) -> None:
        @app.command(name, help=help_text)
        def command(
            overrides: overrides_argument = None,  # type: ignore[valid-type]
            config: config_option = None,  # type: ignore[valid-type]
            resume: Annotated[
                bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run folder.")
            ] = False,
        ) -> None:
            run(module, function, config, [*(overrides or []), *(["resume=true"] if resume else [])])

    def run(module: str, function: str, config: Path | None, overrides: list[str]) -> None:
        def work() -> None:
            import importlib

            from marlhf.config import load_config

            print(getattr(importlib.import_module(module), function)(load_config(config, overrides)))

        _guarded(work)

    training_command("sft", "Fine-tune a causal language model on responses.", "marlhf.stages.sft", "run_sft")
    training_command("reward", "Train a reward model on preference pairs.", "marlhf.stages.reward", "run_reward")
    training_command("ppo", "PPO or macro-action PPO against a reward model.", "marlhf.stages.ppo", "run_ppo")
    stage_command("generate", "Write responses for prompts.", "marlhf.stages.evaluate", "run_generate")
    stage_command("evaluate", "Measure a policy on held-out prompts.", "marlhf.stages.evaluate", "run_evaluate")

    @app.command("doctor", help="Check models, data and settings of a PPO run; exit code 1 if one is wrong.")
    def doctor(overrides: overrides_argument = None, config: config_option = None) -> None:  # type: ignore[valid-type]
        def work() -> None:
            from marlhf.config import load_config
            from marlhf.doctor import run_doctor

            sys.exit(0 if run_doctor(load_config(config, overrides or [])) else 1)

        _guarded(work)

    @app.command("config", help="Print the configuration with every key and default spelt out.")
    def show(overrides: overrides_argument = None, config: config_option = None) -> None:  # type: ignore[valid-type]
        def work() -> None:
            from marlhf.config import load_config, to_yaml

            print(to_yaml(load_config(config, overrides or [])), end="")

        _guarded(work)

    @app.command("report", help="One offline HTML page about one or several run folders.")
    def report(
        folders: Annotated[list[Path], typer.Argument(help="Run folders.")],
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="Default: report.html in the first.")
        ] = None,
    ) -> None:
        def work() -> None:
            from marlhf.report import build_report

            names = {folder.resolve().name if len(folders) > 1 else str(folder): folder for folder in folders}
            if len(names) < len(folders):
                names = {str(folder): folder for folder in folders}
            title = "marlhf: " + ", ".join(names)
            print(build_report(names, output or folders[0] / "report.html", title=title))

        _guarded(work)

    @app.command("demo", help="SFT, reward model, PPO and macro-action PPO on docstrings, in minutes on a CPU.")
    def demo(
        folder: Annotated[Path, typer.Option("--folder", help="Where the demo's runs go.")] = Path("runs/demo"),
        seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
        scale: Annotated[str, typer.Option(help="`full`, or `tiny` to try the plumbing in seconds.")] = "full",
    ) -> None:
        def work() -> None:
            from marlhf.demo import run_demo

            run_demo(folder, seed=seed, scale=scale)

        _guarded(work)

    app()


def _guarded(work: Callable[[], None]) -> None:
    """Runs a command: a user's mistake is one message and exit code 2, Ctrl-C or SIGTERM is exit code 130."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from marlhf.errors import UserError

        work()
    except UserError as error:
        print(f"marlhf: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("marlhf: stopped; a run that had begun says in its folder's status.json where", file=sys.stderr)
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"marlhf: out of memory: {str(error).splitlines()[0] if str(error) else 'no more can be allocated'}\n"
            "While a model trains, lower the stage's microbatch_size, which changes no result; while PPO samples, "
            "lower ppo.rollout.generation_batch_size; shorter data.max_prompt_tokens, data.max_response_tokens or "
            "rollout.max_new_tokens, or a model.dtype of bfloat16, help everywhere. --resume goes on from the last "
            "checkpoint",
            file=sys.stderr,
        )
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in {"marlhf", "marlhf_kernels"}:
            raise
        print(f"marlhf: {error.name} is not installed; {EXTRA}", file=sys.stderr)
        sys.exit(2)


def _is_out_of_memory(error: Exception) -> bool:
    """Of a GPU, of Python, or of PyTorch's CPU allocator, which raises a plain RuntimeError."""
    words = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in words
        or "not enough memory" in words
    )


if __name__ == "__main__":
    main()
