"""Checkpoints: everything that a stage needs to go on bit for bit, each whole or not there.

A checkpoint is a folder `checkpoints/step_000120` that is written beside its name and renamed. It holds every model
as transformers loads it, the state of optimisers, schedules, generators and counters (`training.pt`, read with
`weights_only=True`), `state.json`, and the size and SHA-256 of every file in `manifest.json`, so that a damaged
checkpoint is told from a whole one.
"""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from marlhf.config import CheckpointConfig, Config, ModelConfig, load_config, one_of
from marlhf.data import EncodedRow
from marlhf.errors import ConfigError, UserError
from marlhf.files import write_folder_atomically
from marlhf.models import save_model
from marlhf.progress import console
from marlhf.run_folder import RunFolder, RunState, check_free

# What a resumed run may change in its stage's section without becoming another run.
FREE_KEYS = frozenset({"run_folder", "checkpoints", "eval_every", "eval_rows", "samples_per_eval", "rollout_table"})
# These too, where no learning-rate schedule depends on them.
LENGTH_KEYS = frozenset({"iterations", "max_steps", "epochs"})


class Stateful(Protocol):
    """What has a state that can be saved and set."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Start:
    """Where a stage begins: at step 0, or at a checkpoint."""

    run: RunState | None = None
    """What the run folder goes back to; None: a new folder."""
    checkpoint: Path | None = None
    best: Mapping[str, float] | None = None
    identity: Mapping[str, str] | None = None

    @property
    def step(self) -> int:
        """Steps that were done before."""
        return self.run.step if self.run else 0

    def model(self, config: ModelConfig, name: str) -> ModelConfig:
        """The configuration with the checkpoint's weights in place of its own; unchanged at step 0."""
        return config if self.checkpoint is None else replace(config, path=str(self.checkpoint / name))


def find_start(config: Config, stage: str) -> Start:
    """The beginning for a new run; with `config.resume` the newest whole checkpoint of the stage's run folder.

    A folder without any checkpoint starts again from step 0. Raises ConfigError if the folder is not free, or
    with `resume` belongs to another configuration, UserError if no checkpoint in it is whole.
    """
    section = getattr(config, stage)
    key = f"{stage}.run_folder"
    folder = Path(section.run_folder)
    if not config.resume:
        check_free(folder, key=key)
        return Start()
    if not folder.is_dir() or not any(folder.iterdir()):
        console.print(f"{stage}: nothing to resume in {folder}; starting", highlight=False, markup=False)
        return Start()
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"`{key}`: {folder} holds no run that could be resumed (it has no config.yaml)")
    _check_same_run(config, load_config(folder / "config.yaml"), stage)
    damaged = []
    for path in reversed(_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            run = RunState(**state["run"])
            console.print(f"{stage}: resuming after step {run.step} from {path}", highlight=False, markup=False)
            return Start(run, path, state["best"], state["identity"])
        damaged.append(f"{path.name}: {problem}")
        console.print(f"{stage}: {path} is damaged and left aside: {problem}", highlight=False, markup=False)
    if damaged:
        raise UserError(
            f"`{key}`: no checkpoint in {folder} is whole ({'; '.join(damaged)}); delete the folder to start again"
        )
    console.print(f"{stage}: {folder} holds no checkpoint yet; starting again", highlight=False, markup=False)
    return Start(RunState())


class Checkpoints:
    """Writes the checkpoints of one run, and restores the one that it starts from."""

    def __init__(
        self,
        run: RunFolder,
        config: CheckpointConfig,
        *,
        tokenizer: Any,
        models: Mapping[str, nn.Module],
        state: Mapping[str, Stateful],
        generators: Mapping[str, torch.Generator] | None = None,
        identity: Mapping[str, str],
    ) -> None:
        """`state` is whatever has a state_dict; `identity` must be equal when the run is resumed."""
        self._run = run
        self._config = config
        self._tokenizer = tokenizer
        self._models = models
        self._state = state
        self._generators = generators or {}
        self._identity = dict(identity)
        self._best: dict[str, float] | None = None
        self._seen: set[str] = set()

    def restore(self, start: Start) -> None:
        """Sets the state of a checkpoint. Its models are loaded by whoever makes them, with `start.model`."""
        if start.checkpoint is None:
            return
        for name, now in self._identity.items():
            before = (start.identity or {}).get(name)
            if before != now:
                raise ConfigError(
                    f"{self._run.path}: this run began with other {name} ({before}; now {now}), so it cannot be "
                    "resumed; go back to them, or name another run_folder"
                )
        saved = torch.load(start.checkpoint / "training.pt", map_location="cpu", weights_only=True)
        for name, entry in self._state.items():
            entry.load_state_dict(saved["state"][name])
        for name, generator in self._generators.items():
            generator.set_state(saved["generators"][name])
        random.setstate(saved["python_random"])
        torch.set_rng_state(saved["torch_random"])
        if torch.cuda.is_available() and saved["cuda_random"]:
            torch.cuda.set_rng_state_all(saved["cuda_random"])
        self._best = dict(start.best) if start.best else None
        for path in _checkpoints(self._run.path):
            if _step(path) > start.step:
                shutil.rmtree(path, ignore_errors=True)

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when a step is logged: saves every so many steps, at the last one, and at a new best."""
        self._seen.update(metrics)
        last = step == self._run.total_steps
        due = self._config.every is not None and (step % self._config.every == 0 or last)
        best = self._is_best(metrics)
        if best and self._config.best_metric:
            self._best = {"step": step, "value": metrics[self._config.best_metric]}
        if due or best:
            self._save(step)
        if last and self._config.best_metric and self._config.best_metric not in self._seen:
            console.print(
                f"`checkpoints.best_metric` is {self._config.best_metric!r}, which was never logged; logged were "
                f"{', '.join(sorted(self._seen))}",
                highlight=False,
                markup=False,
            )

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._config.best_metric or "")
        if value is None or not math.isfinite(value):
            return False
        if self._best is None:
            return True
        before = self._best["value"]
        return value > before if self._config.best_mode == "max" else value < before

    def _save(self, step: int) -> None:
        path = self._run.path / "checkpoints" / f"step_{step:06d}"

        def fill(folder: Path) -> None:
            for name, model in self._models.items():
                save_model(model, self._tokenizer, folder / name)
            training = {
                "state": {name: entry.state_dict() for name, entry in self._state.items()},
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
                "python_random": random.getstate(),
                "torch_random": torch.get_rng_state(),
                "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            }
            try:
                torch.save(training, folder / "training.pt")
            except RuntimeError as error:
                # PyTorch's writer tells a full disk in its own words.
                reason = str(error).splitlines()[0]
                raise UserError(f"{path}: cannot be written: {reason}; is the disk full?") from error
            state = {"run": asdict(self._run.state(step)), "best": self._best, "identity": self._identity}
            (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
            manifest = {name: [size, digest] for name, size, digest in _contents(folder)}
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

        write_folder_atomically(path, fill)
        for old in _checkpoints(self._run.path)[: -self._config.keep]:
            if self._best is None or _step(old) != self._best["step"]:
                shutil.rmtree(old, ignore_errors=True)


def check_checkpoints(config: CheckpointConfig, *, key: str) -> None:
    """ConfigError for values that cannot work."""
    if config.every is not None and config.every < 1:
        raise ConfigError(f"`{key}.every` is {config.every}; it must be at least 1, or null for no checkpoints")
    if config.keep < 1:
        raise ConfigError(f"`{key}.keep` is {config.keep}; it must be at least 1")
    one_of(config.best_mode, ("max", "min"), key=f"{key}.best_mode")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None if each has the size and the hash that were written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        expected = {name: (size, digest) for name, (size, digest) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"manifest.json cannot be read ({error})"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _sha256(file) != digest:
            return f"{name} is not what was written (SHA-256)"
    return None


def rows_identity(rows: Sequence[EncodedRow]) -> str:
    """Number and hash of the rows' tokens."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.prompt_ids, sorted(row.response_ids.items()))).encode())
    return f"{len(rows)} rows, {digest.hexdigest()[:12]}"


def weights_identity(model: nn.Module) -> str:
    """Number of parameters and a hash over a sample of each tensor."""
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        count += flat.numel()
        sample = flat[:: max(1, flat.numel() // 4096)].float().cpu().contiguous()
        digest.update(name.encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return f"{count} parameters, {digest.hexdigest()[:12]}"


def _check_same_run(config: Config, saved: Config, stage: str) -> None:
    """ConfigError that shows every difference that would make it another run."""
    now, before = asdict(config), asdict(saved)
    section = now[stage]
    schedules = {value["schedule"] for key, value in section.items() if key.endswith("optimizer")}
    free = FREE_KEYS | (LENGTH_KEYS if schedules == {"constant"} else frozenset())
    differences = []
    for key, old, new in (
        ("seed", before["seed"], now["seed"]),
        *_differences(f"{stage}", before[stage], section, free),
    ):
        if old != new:
            differences.append(f"  {key}: {old!r} when it began, {new!r} now")
    if differences:
        raise ConfigError(
            f"{section['run_folder']}: the configuration is not the one that this run began with, so it cannot be "
            "resumed; undo the differences, or name another run_folder:\n" + "\n".join(differences)
        )


def _differences(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any], free: Iterable[str]
) -> Iterable[tuple[str, Any, Any]]:
    for key, new in now.items():
        if key in free:
            continue
        old = before.get(key)
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            yield from _differences(f"{prefix}.{key}", old, new, ())
        elif old != new:
            yield f"{prefix}.{key}", old, new


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted((folder / "checkpoints").glob("step_*"), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _contents(folder: Path) -> Iterable[tuple[str, int, str]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(folder)), file.stat().st_size, _sha256(file)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
