"""A stage that stopped goes on from its last whole checkpoint to the same bits as one that never stopped."""

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import marlhf
from marlhf import checkpoint as module
from marlhf.checkpoint import damage
from marlhf.config import Config
from marlhf.errors import ConfigError, UserError
from marlhf.run_folder import RunFolder
from marlhf.stages.ppo import run_ppo
from marlhf.stages.reward import run_reward
from marlhf.stages.sft import run_sft
from tests.trainer.tiny import (
    PAIRS,
    ROWS,
    leftovers,
    read_jsonl,
    resolved,
    save_policy,
    status,
    without_times,
    write_jsonl,
)


@dataclass(frozen=True)
class Stage:
    """A stage of four steps with a checkpoint after each, and every source of randomness in use."""

    name: str
    run: Callable[[Config], Path]
    words: tuple[str, ...]
    length: str
    """The key that says how many steps there are."""

    def config(self, root: Path, *words: str) -> Config:
        return resolved(root, *self.words, *(f"{self.name}.{word}" if word[0] != "=" else word[1:] for word in words))

    def folder(self, root: Path) -> Path:
        return root / "runs" / self.name


@pytest.fixture(params=["sft", "reward", "ppo"])
def stage(request: pytest.FixtureRequest, make_stage: Callable[[str], Stage]) -> Stage:
    return make_stage(request.param)


@pytest.fixture(scope="module")
def make_stage(
    tiny_tokenizer: Any, scorers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Stage]:
    root = tmp_path_factory.mktemp("checkpoint")
    dropping = save_policy(root / "policy", tiny_tokenizer, resid_pdrop=0.3, embd_pdrop=0.3)
    rows, pairs = write_jsonl(root / "rows.jsonl", ROWS), write_jsonl(root / "pairs.jsonl", PAIRS)

    def make(name: str) -> Stage:
        common = (
            f"{name}.model.path={dropping}",
            f"{name}.data.train={pairs if name == 'reward' else rows}",
            f"{name}.data.validation={pairs if name == 'reward' else rows}",
            f"{name}.eval_rows=4",
            f"{name}.eval_every=1",
            f"{name}.checkpoints.every=1",
        )
        if name != "ppo":
            return Stage(
                name,
                run_sft if name == "sft" else run_reward,
                (*common, f"{name}.batch_size=5", f"{name}.max_steps=4", f"{name}.optimizer.learning_rate=1e-3"),
                "max_steps",
            )
        more = (
            f"ppo.reward_model.path={scorers['gpt2']}",
            "ppo.rollout.batch_size=8",
            "ppo.rollout.max_new_tokens=6",
            "ppo.termination.n=2",
            "ppo.iterations=4",
            "ppo.kl_target=0.05",
            "ppo.kl_horizon=100",
            "ppo.samples_per_eval=2",
            "ppo.policy_optimizer.learning_rate=1e-3",
            "ppo.critic_optimizer.learning_rate=1e-3",
        )
        return Stage(name, run_ppo, (*common, *more), "iterations")

    return make


def results(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves but for what a clock decides: weights as bytes, logs as lines."""
    weights = {
        str(file.relative_to(folder)): file.read_bytes()
        for name in ("final", "critic")
        for file in sorted((folder / name).glob("*.safetensors"))
    }
    assert weights
    logs = {
        name: without_times(read_jsonl(folder / name))
        for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
        if (folder / name).exists()
    }
    return {**weights, **logs}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def stopped_at(monkeypatch: pytest.MonkeyPatch, step: int) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C arrives when a step's line has been written, before its checkpoint."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        original = RunFolder.log

        def log(self: RunFolder, number: int, metrics: dict[str, float]) -> None:
            original(self, number, metrics)
            if number == step:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "log", log)
            with pytest.raises(KeyboardInterrupt):
                yield

    return patched()


# To the same bits


def test_four_steps_are_two_and_two_more(stage: Stage, tmp_path: Path) -> None:
    stage.run(stage.config(tmp_path / "whole"))
    stage.run(stage.config(tmp_path / "parts", f"{stage.length}=2"))
    half = results(stage.folder(tmp_path / "parts"))
    stage.run(stage.config(tmp_path / "parts", "=resume=true"))
    whole, parts = (results(stage.folder(tmp_path / name)) for name in ("whole", "parts"))
    assert parts == whole
    assert parts != half
    assert status(stage.folder(tmp_path / "parts"))["state"] == "finished"
    seconds = [line["seconds"] for line in read_jsonl(stage.folder(tmp_path / "parts") / "metrics.jsonl")]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_without_its_checkpoint_is_done_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """With a schedule that counts to the end, checkpoints after every second step."""
    optimizers = ("policy_optimizer", "critic_optimizer") if stage.name == "ppo" else ("optimizer",)
    changes = ["checkpoints.every=2", *(f"{name}.schedule=linear" for name in optimizers)]
    stage.run(stage.config(tmp_path / "whole", *changes))
    folder = stage.folder(tmp_path / "parts")
    with stopped_at(monkeypatch, step):
        stage.run(stage.config(tmp_path / "parts", *changes))
    assert status(folder)["state"] == "interrupted"
    assert read_jsonl(folder / "metrics.jsonl")[-1]["step"] == step
    stage.run(stage.config(tmp_path / "parts", *changes, "=resume=true"))
    assert results(folder) == results(stage.folder(tmp_path / "whole"))
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tag = f"{stage.name}/{'score' if stage.name == 'ppo' else 'loss'}"
    assert [event.step for event in events.Scalars(tag)] == [1, 2, 3, 4]


def test_a_finished_run_resumed_stays_what_it_is(stage: Stage, tmp_path: Path) -> None:
    stage.run(stage.config(tmp_path))
    before = results(stage.folder(tmp_path))
    stage.run(stage.config(tmp_path, "=resume=true"))
    assert results(stage.folder(tmp_path)) == before


def test_nothing_to_resume_is_a_start(make_stage: Callable[[str], Stage], tmp_path: Path, capsys: Any) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path / "one"))
    stage.run(stage.config(tmp_path / "other", "=resume=true"))
    assert "nothing to resume" in capsys.readouterr().out
    assert results(stage.folder(tmp_path / "one")) == results(stage.folder(tmp_path / "other"))


# What is kept


def test_the_newest_are_kept_and_load_with_transformers_alone(tmp_path: Path, make_stage: Any) -> None:
    for name, models in (
        ("sft", {"model": AutoModelForCausalLM}),
        ("reward", {"model": AutoModelForSequenceClassification}),
        ("ppo", {"policy": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}),
    ):
        stage = make_stage(name)
        stage.run(stage.config(tmp_path))
        folder = stage.folder(tmp_path)
        assert steps(folder) == ["step_000003", "step_000004"]
        last = folder / "checkpoints" / "step_000004"
        final = {"model": "final", "policy": "final", "critic": "critic"}
        for part, kind in models.items():
            loaded = kind.from_pretrained(last / part).state_dict()
            for key, value in kind.from_pretrained(folder / final[part]).state_dict().items():
                assert torch.equal(loaded[key], value)
        assert leftovers(folder) == []


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_is_kept_beside_the_newest(tmp_path: Path, make_stage: Any, mode: str) -> None:
    stage = make_stage("ppo")
    words = ("checkpoints.best_metric=eval/score", f"checkpoints.best_mode={mode}", "checkpoints.keep=1")
    stage.run(stage.config(tmp_path, *words, "iterations=6", "policy_optimizer.learning_rate=1e-2"))
    scores = {line["step"]: line["eval/score"] for line in read_jsonl(stage.folder(tmp_path) / "metrics.jsonl")[1:]}
    best = (max if mode == "max" else min)(scores, key=lambda step: scores[step])
    assert steps(stage.folder(tmp_path)) == sorted({f"step_{best:06d}", "step_000006"})


def test_none_are_kept_when_none_are_asked_for(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "checkpoints.every=null"))
    assert not (stage.folder(tmp_path) / "checkpoints").exists()


def test_a_best_metric_that_does_not_exist_is_told(tmp_path: Path, make_stage: Any, capsys: Any) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "checkpoints.best_metric=eval/los"))
    out = " ".join(capsys.readouterr().out.split())
    assert "'eval/los', which was never logged; logged were eval/loss, grad_norm" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("checkpoints.every=0", r"`sft.checkpoints.every` is 0"),
        ("checkpoints.keep=0", r"`sft.checkpoints.keep` is 0"),
        ("checkpoints.best_mode=most", r"`sft.checkpoints.best_mode` is 'most'"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, make_stage: Any, word: str, message: str) -> None:
    stage = make_stage("sft")
    with pytest.raises(ConfigError, match=message):
        stage.run(stage.config(tmp_path, word))
    assert list(tmp_path.iterdir()) == []


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("=seed=7",), r"seed: 0 when it began, 7 now"),
        (("optimizer.learning_rate=0.5",), r"sft.optimizer.learning_rate: 0.001 when it began, 0.5 now"),
        (("batch_size=4", "optimizer.warmup_steps=2"), r"(?s)warmup_steps: 0 when it began, 2 .*batch_size: 5 when"),
    ],
)
def test_another_configuration_is_refused_with_the_difference(
    tmp_path: Path, make_stage: Any, words: tuple[str, ...], message: str
) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "max_steps=2"))
    before = results(stage.folder(tmp_path))
    with pytest.raises(ConfigError, match=message):
        stage.run(stage.config(tmp_path, *words, "=resume=true"))
    assert results(stage.folder(tmp_path)) == before


def test_a_longer_run_is_another_one_where_a_schedule_counts_to_its_end(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "max_steps=2", "optimizer.schedule=linear"))
    with pytest.raises(ConfigError, match=r"sft.max_steps: 2 when it began, 4 now"):
        stage.run(stage.config(tmp_path, "optimizer.schedule=linear", "=resume=true"))


def test_what_does_not_touch_training_may_change(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("ppo")
    stage.run(stage.config(tmp_path / "whole"))
    stage.run(stage.config(tmp_path / "parts", "iterations=2"))
    free = ("eval_every=3", "eval_rows=2", "samples_per_eval=1", "checkpoints.keep=3", "=ppo.rollout_table=0")
    stage.run(stage.config(tmp_path / "parts", *free, "=resume=true"))
    whole, parts = (results(stage.folder(tmp_path / name)) for name in ("whole", "parts"))
    assert [whole[name] for name in whole if "safetensors" in name] == [
        parts[name] for name in parts if "safetensors" in name
    ]


def test_other_data_is_refused(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    stage.run(stage.config(tmp_path, "max_steps=2", f"data.train={data}"))
    write_jsonl(data, [*ROWS[:-1], {"prompt": ROWS[-1]["prompt"], "response": "Something else."}])
    with pytest.raises(ConfigError, match=r"other training rows \(12 rows, .*; now 12 rows"):
        stage.run(stage.config(tmp_path, f"data.train={data}", "=resume=true"))
    assert status(stage.folder(tmp_path))["state"] == "failed"
    write_jsonl(data, ROWS)
    stage.run(stage.config(tmp_path, f"data.train={data}", "=resume=true"))
    assert status(stage.folder(tmp_path))["step"] == 4


def test_another_reference_is_refused(tmp_path: Path, make_stage: Any, tiny_tokenizer: Any) -> None:
    """The reference stays the start of the run, also when its folder holds other weights by now."""
    stage = make_stage("ppo")
    start = save_policy(tmp_path / "start", tiny_tokenizer)
    stage.run(stage.config(tmp_path, "iterations=2", f"model.path={start}"))
    save_policy(start, tiny_tokenizer, seed=5)
    with pytest.raises(ConfigError, match=r"other reference weights"):
        stage.run(stage.config(tmp_path, f"model.path={start}", "=resume=true"))


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    stage.folder(tmp_path).mkdir(parents=True)
    (stage.folder(tmp_path) / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no run that could be resumed"):
        stage.run(stage.config(tmp_path, "=resume=true"))
    with pytest.raises(ConfigError, match=r"go on from its last checkpoint with --resume"):
        stage.run(stage.config(tmp_path))


def test_a_run_that_another_process_is_writing_is_refused(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    config = stage.config(tmp_path, "max_steps=2")
    stage.run(config)
    settings = {"config": config, "stage": "sft", "total_steps": 2, "key": "sft.run_folder"}
    with (
        RunFolder(stage.folder(tmp_path), back_to=module.RunState(2), **settings),
        pytest.raises(UserError, match=r"another process is writing this run"),
    ):
        stage.run(stage.config(tmp_path, "=resume=true"))
    stage.run(stage.config(tmp_path, "=resume=true"))


# Damage


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in the weights": (
        lambda path: flip_a_bit(path / "model" / "model.safetensors"),
        "model.safetensors is not what was written",
    ),
    "a flipped bit in the optimiser": (lambda path: flip_a_bit(path / "training.pt"), "training.pt is not what was"),
    "a short file": (lambda path: os.truncate(path / "training.pt", 100), "training.pt has 100 bytes instead of"),
    "a missing file": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "a missing folder": (lambda path: shutil.rmtree(path / "model"), "is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 60), "manifest.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, make_stage: Any, kind: str, capsys: Any
) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "checkpoints.keep=4"))
    folder = stage.folder(tmp_path)
    whole = results(folder)
    spoil, message = DAMAGES[kind]
    spoil(folder / "checkpoints" / "step_000004")
    assert damage(folder / "checkpoints" / "step_000003") is None
    capsys.readouterr()
    stage.run(stage.config(tmp_path, "checkpoints.keep=4", "=resume=true"))
    out = " ".join(capsys.readouterr().out.split())
    assert "step_000004 is damaged" in out
    assert message in out
    assert "resuming after step 3" in out
    assert results(folder) == whole
    assert damage(folder / "checkpoints" / "step_000004") is None


def test_when_none_is_whole_nothing_is_touched(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path))
    folder = stage.folder(tmp_path)
    for name in steps(folder):
        flip_a_bit(folder / "checkpoints" / name / "training.pt")
    before = {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is whole \(step_000004: .*step_000003: .*delete the folder"
    ):
        stage.run(stage.config(tmp_path, "=resume=true"))
    assert {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")} == before


class _Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def test_a_checkpoint_is_data_and_never_runs(tmp_path: Path, make_stage: Any) -> None:
    """Even one whose manifest was made to fit."""
    stage = make_stage("sft")
    stage.run(stage.config(tmp_path, "max_steps=2"))
    path = stage.folder(tmp_path) / "checkpoints" / "step_000002"
    with (path / "training.pt").open("wb") as file:
        torch.save({"state": _Runs(f"touch {tmp_path}/ran")}, file)
    manifest = {name: [size, digest] for name, size, digest in module._contents(path) if name != "manifest.json"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert damage(path) is None
    with pytest.raises(pickle.UnpicklingError):
        stage.run(stage.config(tmp_path, "=resume=true"))
    assert not (tmp_path / "ran").exists()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    path.mkdir(parents=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    disk = tmp_path / "disk"
    with small_disk(disk, "2m"):
        stage.run(stage.config(disk, "max_steps=1", "checkpoints.keep=4"))
        folder = stage.folder(disk)
        whole = results(folder)
        # No room for another checkpoint, but for a line of metrics.
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * (free - 60_000))
        with pytest.raises(UserError, match=r"cannot be written: No space left on device"):
            stage.run(stage.config(disk, "checkpoints.keep=4", "=resume=true"))
        assert steps(folder) == ["step_000001"]
        assert damage(folder / "checkpoints" / "step_000001") is None
        assert results(folder)["final/model.safetensors"] == whole["final/model.safetensors"]
        assert leftovers(disk) == []
        # No room at all.
        with contextlib.suppress(OSError), (disk / "more").open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()
        with pytest.raises(UserError, match=r"cannot be written: No space left on device"):
            stage.run(stage.config(disk, "checkpoints.keep=4", "=resume=true"))
        assert damage(folder / "checkpoints" / "step_000001") is None
        (disk / "filler").unlink()
        (disk / "more").unlink()
        stage.run(stage.config(disk, "max_steps=2", "checkpoints.keep=1", "=resume=true"))
        stage.run(stage.config(tmp_path, "max_steps=2"))
        assert results(folder)["final/model.safetensors"] == results(stage.folder(tmp_path))["final/model.safetensors"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, make_stage: Any) -> None:
    stage = make_stage("sft")
    disk = tmp_path / "disk"
    with small_disk(disk, "4m"):
        stage.run(stage.config(disk, "max_steps=1"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(UserError, match=r"Read-only file system"):
            stage.run(stage.config(disk, "=resume=true"))
        with pytest.raises(UserError, match=r"Read-only file system"):
            stage.run(stage.config(disk, f"run_folder={disk}/other"))
        assert damage(stage.folder(disk) / "checkpoints" / "step_000001") is None


# Killed


class Zygote:
    """Runs of stages in processes that are killed from outside."""

    def __init__(self, log: IO[bytes]) -> None:
        root = str(Path(marlhf.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, stage: str, words: list[str], kill_when: Callable[[float], bool] | None = None) -> int:
        """Exit code of a run; `kill_when` is asked with the seconds since its start."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([stage, words]), file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        begun = time.monotonic()
        while kill_when is not None:
            if kill_when(time.monotonic() - begun):
                # Until its exit code is read below, the process id is not given away again.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        return int(self.process.stdout.readline())


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    with (tmp_path / "log.txt").open("wb") as log:
        zygote = Zygote(log)
        yield zygote
        zygote.process.stdin.close()  # type: ignore[union-attr]
        zygote.process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "trials"), [("sft", 3), ("reward", 3), ("ppo", 20)])
def test_killed_at_any_moment_it_ends_with_the_same_weights(
    name: str, trials: int, tmp_path: Path, make_stage: Any, zygote: Zygote
) -> None:
    """SIGKILL at a random moment, in every second trial while a checkpoint is being written, resumed, killed again,
    resumed to the end."""
    stage = make_stage(name)

    def words(root: Path) -> list[str]:
        return [f"run_folder={root}/runs", "device=cpu", "resume=true", *stage.words]

    begun = time.monotonic()
    assert zygote.run(name, words(tmp_path / "whole")) == 0
    duration = time.monotonic() - begun
    whole = results(stage.folder(tmp_path / "whole"))
    chance = random.Random(0)
    reached = set()
    for trial in range(trials):
        root = tmp_path / f"trial{trial}"
        folder = stage.folder(root)
        killed = 0
        for _ in range(2):
            moment, kept = chance.uniform(0.0, 1.1 * duration), chance.randrange(4)

            def in_a_checkpoint(seconds: float, folder: Path = folder, kept: int = kept) -> bool:
                name = f".step_{kept + 1:06d}."
                return seconds > 2 * duration or any(
                    path.name.startswith(name) for path in (folder / "checkpoints").glob(".step_*.tmp")
                )

            def at_a_moment(seconds: float, moment: float = moment) -> bool:
                return seconds > moment

            code = zygote.run(name, words(root), in_a_checkpoint if trial % 2 else at_a_moment)
            assert code in (0, -signal.SIGKILL), (tmp_path / "log.txt").read_text()
            killed += code != 0
            if code and (folder / "metrics.jsonl").exists():
                reached.add((folder / "metrics.jsonl").read_bytes().count(b"\n"))
        assert zygote.run(name, words(root)) == 0, (tmp_path / "log.txt").read_text()
        assert results(folder) == whole, f"trial {trial}, killed {killed} times"
        assert leftovers(folder) == []
        shutil.rmtree(root)
    # The kills were spread over the run.
    assert len(reached) >= min(3, trials - 1), reached
