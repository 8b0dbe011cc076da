"""The command line: what it prints, how it exits, and how it stops."""

import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from marlhf import cli
from marlhf.errors import UserError
from marlhf.report.reading import read_run
from tests.trainer.children import Child
from tests.trainer.tiny import leftovers, read_jsonl, status

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def marlhf(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process: exit code, standard output and standard error."""
    # What the command sets for its process must not outlive the test.
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "set by the test")
    handler = signal.getsignal(signal.SIGTERM)
    # Colours and a narrow terminal would break the sentences up.
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["marlhf", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def yaml(tmp_path: Path, policies: dict[str, Path], scorers: dict[str, Path], row_file: Path, pair_file: Path) -> Path:
    """A file with a section per stage; every stage is small."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""
run_folder: {tmp_path}/runs
device: cpu
sft:
  model: {{path: {policies["gpt2"]}}}
  data: {{train: {row_file}, validation_fraction: 0.25}}
  batch_size: 4
  max_steps: 2
reward:
  model: {{path: {policies["gpt2"]}}}
  data: {{train: {pair_file}, validation_fraction: 0.25}}
  batch_size: 4
  max_steps: 2
ppo:
  model: {{path: {policies["gpt2"]}}}
  reward_model: {{path: {scorers["gpt2"]}}}
  data: {{train: {row_file}, validation_fraction: 0.25}}
  rollout: {{batch_size: 4, max_new_tokens: 4}}
  iterations: 2
"""
    )
    return file


def test_help_names_every_command(marlhf: Run) -> None:
    code, out, _ = marlhf("--help")
    assert code == 0
    for name in ("sft", "reward", "ppo", "generate", "evaluate", "report", "demo"):
        assert re.search(rf"^\W*{name}\s", out, re.MULTILINE), name
    _, out, err = marlhf()
    assert "ppo" in out + err
    code, out, _ = marlhf("ppo", "--help")
    assert code == 0
    assert "--config" in out


def test_the_stages_one_after_the_other(marlhf: Run, yaml: Path, tmp_path: Path, row_file: Path) -> None:
    """Each finds what the one before it wrote; the last line is the folder; a report of all is one file."""
    for stage in ("sft", "reward", "ppo"):
        chained = {
            "sft": [],
            "reward": ["reward.model.path=${sft.run_folder}/final"],
            "ppo": ["ppo.model.path=${sft.run_folder}/final", "ppo.reward_model.path=${reward.run_folder}/final"],
        }[stage]
        code, out, err = marlhf(stage, "--config", str(yaml), *chained)
        assert code == 0, err
        assert out.splitlines()[-1] == str(tmp_path / "runs" / stage / "final")
        assert status(tmp_path / "runs" / stage)["state"] == "finished"
    sampled = [f"generate.data.train={row_file}", "generate.rollout.max_new_tokens=4"]
    code, out, err = marlhf("generate", *sampled, "-c", str(yaml))
    assert code == 0, err
    assert len(read_jsonl(tmp_path / "runs" / "generated.jsonl")) == 12
    measured = [f"evaluate.data.train={row_file}", "evaluate.rollout.max_new_tokens=4"]
    code, out, err = marlhf("evaluate", "--config", str(yaml), *measured)
    assert code == 0, err
    assert (tmp_path / "runs" / "evaluation.json").is_file()
    folders = [str(tmp_path / "runs" / stage) for stage in ("sft", "reward", "ppo")]
    code, out, err = marlhf("report", *folders)
    assert code == 0, err
    assert Path(out.splitlines()[-1]) == tmp_path / "runs" / "sft" / "report.html"
    assert marlhf("report", folders[2], "-o", str(tmp_path / "page.html"))[0] == 0
    assert "<html" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft"], "`sft.model.path` is not set"),
        (["sft", "--config", "none.yaml"], "none.yaml: there is no such configuration file"),
        (["ppo", "ppo.kl_coeff=1"], "Did you mean `kl_coef`"),
        (["ppo", "ppo.iterations"], "section.key=value"),
        (["ppo", "ppo.iterations=x"], "ppo.iterations"),
        (["ppo"], "`ppo.model.path`: there is no model folder runs/run/sft/final; run the stage that writes it first"),
        (["report", "none"], "none: there is no such run folder"),
        (["demo", "--scale", "huge"], "`--scale` is 'huge'; known: full, tiny"),
    ],
)
def test_a_mistake_is_one_sentence(
    marlhf: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """Exit code 2, no traceback, and nothing written."""
    monkeypatch.chdir(tmp_path)
    code, out, err = marlhf(*arguments)
    assert code == 2
    assert err.startswith("marlhf: ")
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["trian"], ["sft", "--confg", "x"], ["report"], ["demo", "--seed", "x"]])
def test_a_command_that_does_not_exist(marlhf: Run, arguments: list[str]) -> None:
    code, _, err = marlhf(*arguments)
    assert code == 2
    assert "Traceback" not in err
    assert "marlhf" in err


def test_the_demo_does_not_overwrite(marlhf: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = marlhf("demo", "--folder", str(tmp_path), "--scale", "tiny")
    assert code == 2
    assert "`--folder`" in err
    assert "is not empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def stage_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    from marlhf.stages import sft

    def broken(_: Any) -> None:
        raise error

    monkeypatch.setattr(sft, "run_sft", broken)


def test_what_ends_a_command_decides_its_exit_code(marlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stage_that_raises(monkeypatch, UserError("the message"))
    assert marlhf("sft")[::2] == (2, "marlhf: the message\n")
    stage_that_raises(monkeypatch, KeyboardInterrupt())
    code, _, err = marlhf("sft")
    assert code == 130
    assert "status.json" in err
    stage_that_raises(monkeypatch, ModuleNotFoundError("No module named 'peft'", name="peft"))
    code, _, err = marlhf("sft")
    assert code == 2
    assert "peft is not installed" in err
    assert "marlhf[train]" in err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
)
def test_out_of_memory_says_which_knob_to_turn(marlhf: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    stage_that_raises(monkeypatch, error)
    code, _, err = marlhf("sft")
    assert code == 2
    assert "out of memory" in err
    for knob in ("microbatch_size", "ppo.rollout.generation_batch_size", "max_new_tokens", "--resume"):
        assert knob in err


def test_resume_is_an_option_of_every_training_stage(marlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from marlhf.stages import ppo, reward, sft

    for module, name in ((sft, "sft"), (reward, "reward"), (ppo, "ppo")):
        seen: list[bool] = []
        monkeypatch.setattr(module, f"run_{name}", lambda config, seen=seen: seen.append(config.resume))
        assert marlhf(name, "--resume")[0] == marlhf(name)[0] == 0
        assert seen == [True, False]


def test_a_fault_of_ours_keeps_its_traceback(marlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stage_that_raises(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):
        marlhf("sft")
    stage_that_raises(monkeypatch, ModuleNotFoundError("No module named 'marlhf.oops'", name="marlhf.oops"))
    with pytest.raises(ModuleNotFoundError, match="oops"):
        marlhf("sft")


def test_without_the_trainers_packages_it_says_what_to_install(marlhf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    monkeypatch.delitem(sys.modules, "marlhf.config")
    code, _, err = marlhf("sft")
    assert code == 2
    assert "omegaconf is not installed" in err
    assert "pip install 'marlhf[train]'" in err
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["marlhf", "sft"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "pip install 'marlhf[train]'" in str(ended.value)


# Ctrl-C


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_stage_that_is_interrupted(yaml: Path, tmp_path: Path, stage: str) -> None:
    """At any moment of its loop: exit code 130, a status that says where, whole lines, no half-written policy, no
    temporary files and no process left."""
    run = tmp_path / "runs" / stage
    steps = "ppo.iterations=1000000" if stage == "ppo" else f"{stage}.max_steps=1000000"
    often = f"{stage}.eval_every=3"
    with Child(["-m", "marlhf", stage, "--config", str(yaml), steps, often], tmp_path / "log") as child:
        child.wait_for(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
        delay = random.Random().uniform(0, 0.5)
        time.sleep(delay)
        child.interrupt()
        assert child.returncode() == 130, (delay, child.output)
        assert not child.group_lives()
        assert "Traceback" not in child.output, (delay, child.output)
    found = status(run)
    lines = read_jsonl(run / "metrics.jsonl")
    assert found["state"] == "interrupted", delay
    assert found["step"] == lines[-1]["step"]
    assert f"step {found['step']} of 1000000" in found["message"]
    assert not (run / "final").exists()
    assert leftovers(tmp_path) == []
    assert (run / "metrics.jsonl").read_bytes().endswith(b"\n")
    for name in ("samples.jsonl", "evaluations.jsonl"):
        if (run / name).exists():
            read_jsonl(run / name)
    assert read_run(stage, run).problems == []


@pytest.mark.parametrize("reached", ["marlhf.errors", "torch", "transformers"])
def test_a_stage_that_is_interrupted_while_it_starts(yaml: Path, tmp_path: Path, reached: str) -> None:
    """While its packages load, by Ctrl-C or by SIGTERM: exit code 130 without a traceback, and no run folder."""
    with Child(["-X", "importtime", "-m", "marlhf", "sft", "--config", str(yaml)], tmp_path / "log") as child:
        child.wait_for(lambda: re.search(rf"\| *{re.escape(reached)}$", child.output, re.MULTILINE) is not None)
        child.interrupt(signal.SIGTERM if reached == "torch" else signal.SIGINT)
        assert child.returncode() == 130, child.output[-3000:]
        assert "Traceback" not in child.output
    assert not (tmp_path / "runs").exists()
