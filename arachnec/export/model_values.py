"""Every tensor of a trained model by name, wherever it is: in the checkpoint, or in the folder the run began with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from arachnec.backends.cascade_step import build_model
from arachnec.checkpoint.files import StoredRuns, fill_from, stored_runs
from arachnec.checkpoint.folder import Position, intact
from arachnec.checkpoint.parts import AVERAGE, IN_USE, MASTER, Part
from arachnec.executable.folder import MODEL, Executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import InitialWeights, initial_weights, model_folder
from arachnec.models.weight_files import weight_files

BUFFER = "buffer"


@dataclass(frozen=True)
class TrainedValues:
    """What a checkpoint holds. ``kind`` is which of a parameter's tensors count: its value or its average."""

    path: Path
    position: Position
    kind: str
    stored: Mapping[str, StoredRuns]

    def has(self, name: str) -> bool:
        """Whether this parameter trained."""
        return f"{MASTER}/{name}" in self.stored

    def parameter(self, name: str, shape: torch.Size) -> Tensor:
        """A parameter that trained, in fp32. Raises ``UserError`` where the checkpoint has it in another size."""
        return self._read(f"{self.kind}/{name}", shape, torch.float32)

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """A buffer, as the run left it."""
        return self._read(f"{BUFFER}/{name}", like.shape, like.dtype)

    def _read(self, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        values = torch.empty(shape.numel(), dtype=dtype)
        fill_from(self.path, self.stored, {key: Part(values, 0, shape.numel())})
        return values.view(shape)


def trained_values(folder: Path, digest: str, executable: Path, *, averages: bool) -> TrainedValues:
    """Open the newest whole and undamaged checkpoint in ``folder``, or ``folder`` itself where it is one.

    ``digest`` is that of the model file of ``executable``. Raises ``UserError`` where there is none, or another's.
    """
    for path, commit in intact(folder):
        if commit.position.model != digest:
            raise user_error(
                f"the checkpoint {path} was not made with the model file of {executable}",
                help="give the executable that its run was started with, or of your own loop the model file",
            )
        stored = stored_runs(path, [record.name for record in commit.files])
        if averages and not any(key.startswith(f"{AVERAGE}/") for key in stored):
            raise user_error(
                f"the checkpoint {path} has no averages of the weights",
                help="leave --ema out, or train with an average: arachnec run ... --ema 0.999",
            )
        own = IN_USE if any(key.startswith(f"{IN_USE}/") for key in stored) else MASTER
        return TrainedValues(path, commit.position, AVERAGE if averages else own, stored)
    raise user_error(
        f"{folder} holds no whole checkpoint",
        help="give the folder that was --checkpoint of the run, or one step's folder in it",
    )


META = torch.device("meta")


@dataclass(frozen=True)
class TrainedModel:
    """What a run has trained: its model file, whose ``digest`` its checkpoints have, and where that is from."""

    model_file: ModelFile
    training: Training
    digest: str
    place: Path

    @classmethod
    def of(cls, given: Executable | ModelFile) -> TrainedModel:
        """Of an own loop's model file by itself: its checkpoints are read alike, and it has no executable."""
        if isinstance(given, ModelFile):
            return cls(given, Training(), given.digest, given.path)
        return cls(given.model_file(), given.training, given.digests[MODEL], given.folder)


@dataclass
class ModelValues:
    """``model`` has names, shapes and precisions, on the meta device where it can be built there."""

    model: nn.Module
    trained: TrainedValues
    initial: InitialWeights | None
    build: Callable[[], nn.Module]

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """All parameters and buffers by name, those that are tied under each name."""
        return _named(self.model)

    def value(self, name: str) -> Tensor:
        """The tensor on the CPU: in fp32 where it trained, else as it was stored or drawn. Raises ``UserError``."""
        like = self.named[name]
        key = self._trained_names.get(id(like))
        if key is not None:
            return self.trained.parameter(key, like.shape)
        if not isinstance(like, nn.Parameter) and f"{BUFFER}/{name}" in self.trained.stored:
            return self.trained.buffer(name, like)
        read = None if self.initial is None else self.initial.value(name, like.dtype)
        return self._drawn[name].detach() if read is None else read

    def demand(self, names: Iterable[str]) -> None:
        """Raises ``UserError`` where one of these is frozen, and the folder that it came from is not known."""
        if self.initial is not None or not self.trained.position.init:
            return
        values = [self.named[name] for name in names]
        if any(isinstance(value, nn.Parameter) and id(value) not in self._trained_names for value in values):
            raise user_error(
                f"the frozen weights of the checkpoint {self.trained.path} are in the folder that its run began with",
                help="give it as --init FOLDER, or write what has trained alone: --lora",
            )

    @cached_property
    def _trained_names(self) -> dict[int, str]:
        """The name under which the checkpoint has a parameter, by the parameter: of a tied one the first."""
        return {id(value): name for name, value in reversed(self.named.items()) if self.trained.has(name)}

    @cached_property
    def _drawn(self) -> dict[str, Tensor]:
        """All tensors as the model file draws them: the one time that a whole model is held."""
        return _named(self.build())


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def model_values(of: TrainedModel, trained: TrainedValues, init: Path | None) -> ModelValues:
    """The model of a run with the values of a checkpoint. Raises ``UserError`` for the weights of another."""
    model_file = of.model_file
    training = msgspec.structs.replace(of.training, seed=trained.position.seed)

    def build() -> nn.Module:
        return build_model(model_file, training, torch.device("cpu"))

    try:
        with META:
            model = build_model(model_file, training, META)
    except (NotImplementedError, RuntimeError, TypeError, UserError):
        model = build()
    initial = None if init is None else initial_weights(init, model)
    if init is not None and trained.position.init not in ("", weight_files(model_folder(init)).fingerprint()):
        raise user_error(
            f"the run of the checkpoint {trained.path} did not begin with the weights in {init}",
            help="give the folder that was --init of the run",
        )
    return ModelValues(model, trained, initial, build)
