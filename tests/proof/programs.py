"""Programs whose fault depends on a state: which state, where, set when, read by whom; and their source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kinds import ALWAYS, BEFORE_FIT, HOOKS, INSIDE, KINDS, RESUMED, Kind

OWNERS = {"root": "", "child": ".part", "grandchild": ".part.inner", "in a list": ".parts[1]"}
READERS = ("training_step", "forward", "on_train_batch_start", "configure_optimizers")
FAULTS = {
    "divide": "x / level",
    "log": "x * (1 + level.log())",
    "square root": "x + (module.scale * level).square().sqrt()",
    "table": "x * module.table[level.long()]",
}
WHENS = tuple(sorted(ALWAYS))
_EARLY = BEFORE_FIT | {"setup", "configure_model"}
"""Before ``configure_optimizers``."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A small training program that goes wrong at batch `bad`, where its state is 0.

    Attributes:
        kind: what the state is kept in; of `KINDS`.
        when: it becomes what it is at the fault.
        owner: the submodule that has it.
        reader: the code that reads it, once a step, or once for all in ``configure_optimizers``.
        fault: the operation that 0 breaks.
        in_place: it is changed where it is, where its kind can be.
        relative: what it becomes is told from what it was, so that nothing may set it twice.
        bad: the guilty batch, 1 or later.
        touched: kinds of other attributes, of no consequence, that the script changes before fit.
        untouched: more of them, which stay as the constructor makes them.
    """

    kind: str = "float"
    when: str = "script"
    owner: str = "root"
    reader: str = "training_step"
    fault: str = "divide"
    in_place: bool = False
    relative: bool = False
    bad: int = 1
    touched: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    @property
    def makes_sense(self) -> bool:
        kind = KINDS[self.kind]
        return (
            self.when in kind.whens
            and not (self.reader == "forward" and self.owner == "root")
            and not (self.when == "forward" and self.owner == "root")
            and not (kind.root and self.owner != "root")
            and not (self.reader == "configure_optimizers" and self.when not in _EARLY)
            and not (self.when == "countdown" and kind.most <= self.bad)
            and not (self.relative and (kind.stream or self.when in ("saved argument", "ignored argument")))
            and not (self.in_place and not kind.put)
        )

    @property
    def can_be_written(self) -> bool:
        """All of its state can be in a bundle."""
        others = [KINDS[name].comparable for name in self.untouched] + [KINDS[name].written for name in self.touched]
        return KINDS[self.kind].written and all(others)

    @property
    def complexity(self) -> tuple[int, int]:
        """How much of it is not as simple as can be."""
        simple = Program()
        others = sum(getattr(self, each.name) != getattr(simple, each.name) for each in fields(self)[1:])
        return others, len(self.touched) + len(self.untouched)

    def simpler(self) -> Iterator[Program]:
        """Programs of the same kind, some of them much simpler than others."""
        plain = Program(kind=self.kind)
        names = [each.name for each in fields(self)[1:] if getattr(self, each.name) != getattr(plain, each.name)]
        candidates = [plain, replace(self, touched=(), untouched=())]
        candidates += [replace(self, **{name: getattr(plain, name)}) for name in names]
        candidates += [replace(plain, **{name: getattr(self, name)}) for name in names]
        yield from (each for each in dict.fromkeys(candidates) if each.makes_sense and each != self)

    def __str__(self) -> str:
        simple = Program()
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = [f"{name}={value!r}" for name, value in told.items() if value != getattr(simple, name)]
        return f"Program({', '.join(shown)})"


_plain_others = st.sampled_from([name for name, kind in INSIDE.items() if kind.make and "{o}" not in kind.make])


@st.composite
def programs(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Program:
    """Any that makes sense."""
    name = draw(st.sampled_from(kinds))
    kind = KINDS[name]
    owner = "root" if kind.root else draw(st.sampled_from(tuple(OWNERS)))
    bad = draw(st.integers(1, 3))
    program = Program(
        kind=name,
        when=draw(st.sampled_from([when for when in WHENS if when in kind.whens])),
        owner=owner,
        reader=draw(st.sampled_from(READERS)),
        fault=draw(st.sampled_from(tuple(FAULTS))),
        in_place=draw(st.booleans()) and kind.put != "",
        relative=draw(st.booleans()) and not kind.stream,
        bad=bad,
        touched=draw(st.lists(_plain_others, max_size=1).map(tuple)),
        untouched=draw(st.lists(_plain_others, max_size=2).map(tuple)),
    )
    return program if program.makes_sense else draw(programs(kinds))


def hand(kinds: Sequence[str]) -> tuple[Program, ...]:
    """A program of each kind, drawn at random."""
    hands = []

    @settings(
        max_examples=2, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.tuples(*(programs((kind,)) for kind in kinds)))
    def draw(programs: tuple[Program, ...]) -> None:
        hands.append(programs)

    draw()
    return hands[-1]  # the first is the simplest there is


def source(program: Program) -> str:
    """A module with ``Model`` and ``run(callbacks)``."""
    return _Writer(program).text()


FIX = "\n\ndef guard(level):\n    return level.clamp(min=1)\n"
"""Appended to the source, it makes the fault go away."""

_TOP = '''\
"""{program}"""
import collections, dataclasses, datetime, decimal, enum, fractions, functools, io, itertools, logging, math, os
import pathlib, random, threading, types, weakref

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

BAD = {bad}


def guard(level):
    return level


def faulty(module, x, level, is_bad):
    level = guard(torch.where(is_bad, torch.as_tensor(level, dtype=torch.float32), 1))
    return {fault}
'''
_END = """

def keep(batch):
    return batch


def loader(bad):
    g = torch.Generator().manual_seed(5)
    batches = [(torch.randn(4, 3, generator=g), torch.tensor(i == bad)) for i in range(BAD + 2)]
    return DataLoader(batches, batch_size=None, collate_fn=keep)


def trainer(callbacks, epochs=1):
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks, **off)
"""


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.kind: Kind = KINDS[program.kind]
        self.takes_argument = program.when in ("saved argument", "ignored argument")
        self.first = self._first()
        reads_left = program.when in BEFORE_FIT | HOOKS | {RESUMED} and program.reader != "configure_optimizers"
        self.last = program.bad if self.kind.stream and reads_left else 0

    def _first(self) -> int:
        """The number that the constructor makes, if it is not told another."""
        if self.program.when == "countdown":
            return self.program.bad if self.kind.stream else self.program.bad + 1
        return self.kind.healthy

    def text(self) -> str:
        program = self.program
        names = (program.kind, *program.touched, *program.untouched)
        blocks = dict.fromkeys(block for name in names for block in KINDS[name].top.split("\n\n\n") if block)
        # A class comes after its base.
        parts = [_TOP.format(program=program, bad=program.bad, fault=FAULTS[program.fault]).rstrip(), *blocks]
        parts += [self.part(), self.model(), self.callback(), _END.strip(), self.run()]
        return "\n\n\n".join(part for part in parts if part) + "\n"

    # Changing and reading it.

    def change(self, owner: str, number: int | str, *, kind: Kind | None = None, anew: bool = False) -> str:
        kind, name = kind or self.kind, "state"
        if kind.put and (self.program.in_place or not (kind.make or kind.anew)) and not anew:
            form = kind.put
        else:
            form = kind.anew or "{s} = " + kind.make
        return form.format(s=f"{owner}.{name}", o=owner, n=number, name=name)

    def becomes(self, owner: str) -> str:
        """The statement that brings it to what it is at the fault."""
        return self.change(owner, f"int({self.read(owner)}) - 1" if self.program.relative else self.last)

    def read(self, owner: str) -> str:
        return self.kind.get.format(s=f"{owner}.state", o=owner, name="state")

    def counts_down(self, owner: str) -> list[str]:
        is_counted = self.program.when == "countdown" and not self.kind.stream
        return [self.change(owner, f"int({self.read(owner)}) - 1")] if is_counted else []

    @property
    def path(self) -> str:
        return OWNERS[self.program.owner]

    # The classes.

    def init(self, *, is_owner: bool) -> list[str]:
        """Of the root, or of the submodule that owns the state."""
        lines = ["self.scale = nn.Parameter(torch.ones(1))"] if self.program.fault == "square root" else []
        if self.program.fault == "table":
            lines.append('self.register_buffer("table", torch.tensor([float("inf")] + [1.0] * 10))')
        if is_owner and (self.kind.make or self.kind.anew):
            lines.append(self.change("self", "level" if self.takes_argument else self.first, anew=True))
        return lines

    def bases(self, base: str, *, is_owner: bool) -> str:
        return f"Keeps, {base}" if is_owner and "class Keeps" in self.kind.top else base

    def part(self) -> str:
        owner = self.program.owner
        if owner == "root":
            return ""
        takes = f", level={self.first}" if self.takes_argument else ""
        body = [f"class Part({self.bases('nn.Module', is_owner=True)}):", f"    def __init__(self{takes}):"]
        body += _indent(["super().__init__()", *self.init(is_owner=True)], 2)
        body += ["", "    def forward(self, x, is_bad, batch_idx):"]
        lines = []
        if self.program.reader == "forward":
            lines += [*self.counts_down("self"), f"x = faulty(self, x, {self.read('self')}, is_bad)"]
        if self.program.when == "forward":
            lines += ["if batch_idx == BAD - 1:", f"    {self.becomes('self')}"]
        body += _indent([*lines, "return x"], 2)
        if owner == "grandchild":
            argument = "level" if self.takes_argument else ""
            body += ["", "", "class Outer(nn.Module):", f"    def __init__(self{takes}):"]
            body += _indent(["super().__init__()", f"self.inner = Part({argument})"], 2)
            body += ["", "    def forward(self, x, is_bad, batch_idx):"]
            body += _indent(["return self.inner(x, is_bad, batch_idx)"], 2)
        return "\n".join(body)

    def model(self) -> str:
        program, owner = self.program, self.program.owner
        takes = f", level={self.first}" if self.takes_argument else ""
        body = [f"class Model({self.bases('pl.LightningModule', is_owner=owner == 'root')}):"]
        body += [f"    def __init__(self{takes}):"]
        ignored = 'ignore=["level"]' if program.when == "ignored argument" else ""
        lines = ["super().__init__()", f"self.save_hyperparameters({ignored})", "self.layer = nn.Linear(3, 1)"]
        lines += self.init(is_owner=owner == "root")
        argument = "level" if self.takes_argument else ""
        if owner in ("child", "grandchild"):
            lines.append(f"self.part = {'Part' if owner == 'child' else 'Outer'}({argument})")
        elif owner == "in a list":
            lines.append(f"self.parts = nn.ModuleList([Part({argument}), Part({argument})])")
        for number, name in enumerate((*program.touched, *program.untouched)):
            other = KINDS[name]
            lines.append(f"self.other_{number} = " + other.make.format(n=other.healthy))
        if program.reader in ("on_train_batch_start", "configure_optimizers"):
            lines.append("self.seen = 1.0")
        body += _indent(lines, 2)
        body += self.hooks()
        return "\n".join(body)

    def hooks(self) -> list[str]:
        program, mine = self.program, "self" + self.path
        hooks: dict[str, list[str]] = {}
        if program.when in HOOKS:
            stage = ", stage" if program.when == "setup" else ""
            hooks[f"{program.when}(self{stage})"] = [self.becomes(mine)]
        if program.when == RESUMED:
            hooks["on_save_checkpoint(self, checkpoint)"] = ['checkpoint["level"] = 0']
            hooks["on_load_checkpoint(self, checkpoint)"] = [self.becomes(mine)]
        if program.when == "optimizer hook":
            hooks["on_before_optimizer_step(self, optimizer)"] = ["if self.global_step == BAD - 1:"]
            hooks["on_before_optimizer_step(self, optimizer)"] += [f"    {self.becomes(mine)}"]
        step = ["x, is_bad = batch", "x = self.layer(x)"]
        if program.reader == "on_train_batch_start":
            hooks["on_train_batch_start(self, batch, batch_idx)"] = [
                *self.counts_down(mine),
                f"self.seen = float({self.read(mine)})",
            ]
            step.append("x = faulty(self, x, self.seen, is_bad)")
        elif program.reader == "configure_optimizers":
            step.append("x = faulty(self, x, self.seen, is_bad)")
        elif program.reader == "training_step":
            step += [*self.counts_down(mine), f"x = faulty(self, x, {self.read(mine)}, is_bad)"]
        if program.owner != "root":
            called = "self.part" if self.path.startswith(".part.") else mine
            step.append(f"x = {called}(x, is_bad, batch_idx)")
        if program.when == "step":
            step += ["if batch_idx == BAD - 1:", f"    {self.becomes(mine)}"]
        hooks["training_step(self, batch, batch_idx)"] = [*step, "return (x + 1).square().mean()"]
        configure = [f"self.seen = float({self.read(mine)})"] if program.reader == "configure_optimizers" else []
        rate = 1.0 if program.kind == "rate" else 1e-4
        configure.append(f"return torch.optim.SGD(self.parameters(), lr={rate})")
        hooks["configure_optimizers(self)"] = configure
        return [line for head, lines in hooks.items() for line in ("", f"    def {head}:", *_indent(lines, 2))]

    def callback(self) -> str:
        if self.program.when not in ("callback", "callback after a step"):
            return ""
        is_after = self.program.when == "callback after a step"
        head = "on_train_batch_end(self, trainer, model, outputs, batch, batch_idx)"
        if not is_after:
            head = "on_train_batch_start(self, trainer, model, batch, batch_idx)"
        lines = [f"if batch_idx == BAD - {int(is_after)}:", f"    {self.becomes('model' + self.path)}"]
        return "\n".join(["class Changes(pl.Callback):", f"    def {head}:", *_indent(lines, 2)])

    def run(self) -> str:
        program = self.program
        lines = [f"model = Model({f'level={self.last}' if self.takes_argument else ''})"]
        if program.when == "script":
            lines.append(self.becomes("model" + self.path))
        for number, name in enumerate(program.touched):
            other = KINDS[name]
            changed = other.make.format(n=0 if other.most == 1 else 2)
            lines.append(f"model.other_{number} = {changed}")
        callbacks = "[Changes(), *callbacks]" if self.callback() else "callbacks"
        if program.when == RESUMED:
            lines += ["before = trainer([])", "before.fit(Model(), loader(None))"]
            lines += ['before.save_checkpoint(f"{__name__}.ckpt")']
            lines += [f'trainer({callbacks}, 2).fit(model, loader(BAD), ckpt_path=f"{{__name__}}.ckpt")']
        else:
            lines.append(f"trainer({callbacks}).fit(model, loader(BAD))")
        return "\n".join(["def run(callbacks):", *_indent(lines, 1)])


def _indent(lines: list[str], depth: int) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]
