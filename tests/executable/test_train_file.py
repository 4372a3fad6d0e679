"""Training options from a file, settings and flags: each stands where it was given last, and mistakes have a place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arachnec.executable.train_file import located, training_of
from arachnec.executable.training_options import BadTrainValue, Group, Schedule, TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.optimizers.recipe import demand_torch_takes, recipe_of

FILE = """
lr = 2e-4
dtype = "bf16"

[optimizer]
name = "SGD"
momentum = 0.9

[schedule]
name = "CosineAnnealingLR"
T_max = 100
warmup = 10

[[groups]]
match = "*bias"
weight_decay = 0.0
"""


def read(tmp_path: Path, text: str = FILE, settings: tuple[str, ...] = (), **flags: object) -> Training:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return training_of(Training(), path, settings, flags)


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    assert read(tmp_path) == Training(
        lr=2e-4,
        dtype="bf16",
        optimizer=TorchClass("SGD", {"momentum": 0.9}),
        schedule=Schedule(10, TorchClass("CosineAnnealingLR", {"T_max": 100})),
        groups=(Group(match=("*bias",), arguments={"weight_decay": 0.0}),),
    )


def test_settings_stand_instead_of_the_file_and_flags_instead_of_both(tmp_path: Path) -> None:
    settings = ("optimizer.momentum=0.5", "schedule.T_max=7", "lr=1e-3", "seed=4", "ema=0.9")
    training = read(tmp_path, settings=settings, lr=0.5)
    assert training.optimizer == TorchClass("SGD", {"momentum": 0.5})
    assert training.schedule == Schedule(10, TorchClass("CosineAnnealingLR", {"T_max": 7}))
    assert (training.lr, training.seed, training.ema) == (0.5, 4, 0.9)


def test_another_class_begins_anew(tmp_path: Path) -> None:
    training = read(tmp_path, settings=("optimizer=Adafactor", 'schedule={name = "ConstantLR"}'))
    assert training.optimizer == TorchClass("Adafactor", {})
    assert training.schedule == Schedule(10, TorchClass("ConstantLR", {}))


def test_without_a_name_arguments_are_those_of_the_own_adamw() -> None:
    training = training_of(Training(), None, ("optimizer.weight_decay=0.1",))
    assert training.optimizer == TorchClass("AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1})


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("lr = 1\nlearning_rate = 3", 2, "learning_rate"),
        ("\nlr = 'fast'", 2, "`lr` is 'fast': it must be a number"),
        ("shuffle = 1", 1, "it must be true or false"),
        ("[logging]\njsonl = 3", 2, "it must be a text, in quotes"),
        ("[logging]\njsonl = ' '", 2, "`logging.jsonl` is ' ': it is empty"),
        ("[optimizer]\nname = 'AdamW'\neps = inf", 3, "`optimizer.eps` is inf: it is not finite"),
        ("[[groups]]\nmatch = '*'\nbetas = [0.9, nan]", 3, "it is not finite"),
        ("seed = 1\ndtype = 'fp8'", 2, "`dtype` is 'fp8': it must be `fp32` or `bf16`"),
        ("[mix]\nbatch = 4", 2, "`mix.batch` is 4: the mix has no manifests"),
        ("dtype = 16", 1, "it must be `fp32` or `bf16`"),
        ("[timesteps]\nsampling = 'foo'", 2, "it must be `uniform` or `logit-normal`"),
        ("lr = 1.0\nclip_norm = inf", 2, "clip-norm = inf cannot be trained with"),
        ("lr = nan", 1, "lr = nan cannot be trained with"),
        ("ema = nan", 1, "ema = nan cannot be trained with"),
        ("accumulate = 1000000000", 1, "accumulate = 1000000000 cannot be trained with"),
        ("[validation]\nevery = 0", 2, "validation.every = 0 cannot be trained with"),
        ("[validation]\nevery = 5", 2, "validation.every = 5 cannot be trained with"),
        ("[sampling]\nevery = 5", 2, "sampling.every = 5 cannot be trained with"),
        ("lr = -1.0", 1, "lr = -1.0 cannot be trained with"),
        ("[optimizer]\nname = 'SGD'\nlr = 1.0", 3, "a key of its own"),
        ("[schedule]\nT_max = 3", 2, "no scheduler takes it"),
        ("[[groups]]\nlr = 3.0", 1, "no parameter"),
        ("groups = 3", 1, "a list of tables"),
        ("optimizer = 3", 1, "is a table"),
        ("[schedule]\nwarmup = 'long'", 2, "it must be a whole number"),
        ("lr = ", 1, "not TOML"),
    ],
)
def test_a_mistake_is_one_message_at_its_line(tmp_path: Path, text: str, line: int | None, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    (diagnostic,) = caught.value.diagnostics
    assert expected in diagnostic.message
    assert diagnostic.text(diagnostic.help)
    assert line is None or (diagnostic.span is not None and diagnostic.span.line == line)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("lr = 1.0\n[optimiser]\nname = 'SGD'", 2, 2),
        ("lr = 1.0\n[[group]]\nlr = 1.0", 2, 3),
        ("lr = 1.0\n[groups]\nlr = 1.0", 2, 2),
        ("[optimizer]\nwandbb = 1.0\n[logging]\nwandbb = 'x'", 4, 1),
    ],
)
def test_a_wrong_table_is_shown_at_its_head_and_its_key_below_it(
    tmp_path: Path, text: str, line: int, column: int
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert (span.line, span.column) == (line, column)


GROUPS = "[[groups]]\nmatch = '*bias'\neps = 0.1\n"
MIX = "[mix]\nbatch = 2\n[[mix.manifests]]\ndata = 'a'\nweight = 1.0\n"


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        (GROUPS + "[[groups]]\nmatch = '*'\neps = inf", 6, "groups[1].eps"),
        (GROUPS + "[[groups]]\nmatch = '*'\nepsilon = 1.0", 6, "groups[1].epsilon"),
        (GROUPS + "[[groups]]\nmatch = '*'\neps = -1.0", 4, "groups[1]"),
        (GROUPS + "[[groups]]\nmatch = ['*', 3]", 5, "groups[1].match[1]"),
        (GROUPS + "[[groups]]\neps = 1.0", 4, "groups[1]"),
        (GROUPS + "[[groups]]\nmatch = 'gamma'", 5, "groups[1].match"),
        (GROUPS + "[[groups]]\nmatch = 'a.bias'", 5, "groups[1].match"),
        ("groups = [{match = '*bias'}, {match = '*', eps = inf}]", 1, "groups[1].eps"),
        (MIX + "[[mix.manifests]]\ndata = 'b'\nweight = 0.0", 8, "mix.manifests[1].weight"),
        (MIX + "[[mix.manifests]]\nweight = 2.0", 6, "mix.manifests[1]"),
    ],
)
def test_a_mistake_in_one_of_several_tables_is_shown_in_that_table(
    tmp_path: Path, text: str, line: int, key: str
) -> None:
    with pytest.raises(UserError) as caught:
        training = read(tmp_path, text)
        demand_torch_takes(training)
        recipe_of({"a.bias": torch.empty(2), "a.weight": torch.empty(2, 2)}, training)
    (diagnostic,) = located(caught.value, tmp_path / "train.toml").diagnostics
    assert isinstance(diagnostic, BadTrainValue) and diagnostic.key == key
    assert diagnostic.span is not None and diagnostic.span.line == line


def test_a_key_in_other_letters_is_suggested(tmp_path: Path) -> None:
    for key, right in (("LR", "lr"), ("Clip_Norm", "clip_norm")):
        with pytest.raises(UserError) as caught:
            read(tmp_path, f"{key} = 1.0")
        assert caught.value.diagnostics[0].text("{suggestion}") == f"did you mean `{right}`?"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("wandb", "`logging.wandb`"),
        ("every", "`validation.every` or `sampling.every`"),
        ("scheduler", "`schedule`"),
        ("learning-rate", "`lr`"),
        ("weight_decay", "[optimizer]"),
        ("steps", "--steps"),
        ("batch_size", "--batch"),
    ],
)
def test_a_key_of_other_trainers_is_answered_with_its_place_here(tmp_path: Path, key: str, place: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, f"{key} = 1")
    assert place in caught.value.diagnostics[0].text("{suggestion}")


@pytest.mark.parametrize(
    ("setting", "right"),
    [("optimizer=adamw", "AdamW"), ("schedule=cosine", "CosineAnnealingLR"), ("optimizer=SDG", "SGD")],
)
def test_the_nearest_class_of_torch_is_suggested(setting: str, right: str) -> None:
    with pytest.raises(UserError) as caught:
        demand_torch_takes(training_of(Training(), None, (setting,)))
    diagnostic = caught.value.diagnostics[0]
    assert diagnostic.text(diagnostic.help) == f"did you mean `{right}`?"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("warmup=3", "unknown training option"), ("lr", "sets nothing"), ("=3", "sets nothing"), ("ema=2", "ema = 2")],
)
def test_a_setting_that_is_none_is_refused(setting: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        training_of(Training(), None, (setting,))


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("[schedule]\nname = 'StepLR'", 2, "`schedule.name` is 'StepLR': it needs `step_size`"),
        ("lr = 1.0\n[schedule]\nstep_size = 3\nname = 'StepLRs'", 4, "torch has none of that name"),
        ("[optimizer]\nname = 'SGD'\nmomentun = 0.9", 3, "SGD takes no `momentun`"),
        ("[optimizer]\nname = 'AdamW'\ncapturable = 'no'", 3, "`optimizer.capturable` is 'no': expected bool, got str"),
        ("[optimizer]\nname = 'SGD'\nmomentum = -1.0", 1, "SGD refuses its arguments: Invalid momentum value: -1.0"),
        ("[schedule]\nname = 'LambdaLR'", 2, "it takes a function"),
        ("optimizer = 'LBFGS'", 1, "it computes the loss again"),
        ("[[groups]]\nmatch = '*'\nweight_decai = 1", 3, "takes no `weight_decai`"),
    ],
)
def test_what_torch_does_not_take_is_told_at_its_line_before_anything_runs(
    tmp_path: Path, text: str, line: int, expected: str
) -> None:
    training = read(tmp_path, text)
    with pytest.raises(UserError) as caught:
        demand_torch_takes(training)
    (diagnostic,) = located(caught.value, tmp_path / "train.toml").diagnostics
    assert expected in diagnostic.message
    assert diagnostic.text(diagnostic.help)
    assert diagnostic.span is not None
    assert diagnostic.span.line == line
