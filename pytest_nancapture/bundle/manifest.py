"""``bundle.json``: its sections as frozen dataclasses, read strictly and written so that two of them can be diffed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = "nancapture-bundle"
VERSION = 2
MANIFEST_NAME = "bundle.json"

WEIGHTS, BATCH, RNG, OPTIMIZER = (f"{name}.safetensors" for name in ("weights", "batch", "rng", "optimizer"))
REQUIRED_FILES = (WEIGHTS, BATCH, RNG)
ALLOWED_FILES = (*REQUIRED_FILES, OPTIMIZER)

Layouts = dict[str, dict[str, Any]]
"""Of tensors that safetensors cannot hold as they are: name -> how to make them from what is in the file."""


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """How often the fault came back (`runs`) when the bundle was replayed `of` times.

    Attributes:
        how: ``fresh`` where each replay was in a process of its own, ``here`` where it was in the training process;
            empty where none was made.
    """

    runs: int = 0
    of: int = 0
    how: Literal["fresh", "here", ""] = ""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What the gradients looked like at capture.

    Attributes:
        total: number of parameters that had a gradient.
        nonfinite: those whose gradient held NaN or Inf.
        nonzero: those whose gradient was not all zero; of a step that raised before, those behind what it raised over.
    """

    total: int = 0
    nonfinite: tuple[str, ...] = ()
    nonzero: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Healed:
    """What the step would learn with its fault healed, in whatever way that might be done.

    Attributes:
        learns: whether any parameter would have a gradient other than 0.
        idle: of the parameters whose gradients a replay asks for, those that this batch teaches nothing at any weights.
        silent: those among the others that have no gradient once the bad values are 0.
    """

    learns: bool = True
    idle: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Raised:
    """What a step raised over values that are not finite.

    Attributes:
        type: the exception's, such as ``ValueError``.
        message: the first line of it.
    """

    type: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What went wrong, where it was seen, and in which micro-batch.

    Attributes:
        kind: ``nan`` where any value was NaN, else ``inf``; of the loss if that was bad, else of the rest.
        found_in: of ``loss``, ``gradients``, ``buffers``, ``weights``, ``raised``.
        global_step: the optimizer step, counted from 0, as user code reads it.
        batch_idx: of the guilty micro-batch.
        losses: one per micro-batch, as text (JSON has no NaN); empty text where a micro-batch had none.
        buffers: names of buffers that the step left non-finite.
        weights: names of those that were non-finite before the step began or, with a history, after its update.
        seen: how many steps of the run had this fault; the bundle is the first one's.
        healed: what is left for a fix to learn; None where that is not known.
        raised: what the step raised over a value that is not finite, instead of coming to its end.
    """

    kind: Literal["nan", "inf"]
    found_in: tuple[str, ...]
    global_step: int
    epoch: int
    batch_idx: int
    reproduced: Reproduced = Reproduced()
    culprit: dict[str, Any] | None = None
    losses: tuple[str, ...] = ()
    gradients: Gradients = Gradients()
    buffers: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    seen: int = 1
    healed: Healed | None = None
    raised: Raised | None = None


@dataclass(frozen=True, kw_only=True)
class InitialRecord:
    """Weights that are not stored, since today's code makes them when it builds the module.

    Attributes:
        seed: of torch, numpy and python, set before the module is built.
        names: last parts of names -> the submodules that have all of them: ``{"bias weight": ("fc", "head")}``.
        sha256: over name, dtype, shape and bytes of each, as they were when the fault was seen; empty where not known.
        sketch: of each, in the order of names, dtype, shape, and two sums that another processor's rounding spares.
    """

    seed: int
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sha256: str = ""
    sketch: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Iterable[str], seed: int) -> InitialRecord:
        """The record of weights of these names."""
        leaves: dict[str, list[str]] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            leaves.setdefault(path, []).append(leaf)
        paths: dict[str, list[str]] = {}
        for path, last in leaves.items():
            paths.setdefault(" ".join(last), []).append(path)
        return cls(seed=seed, names={last: tuple(places) for last, places in paths.items()})

    def all_names(self) -> list[str]:
        """The weights' names."""
        return [
            f"{path}.{leaf}".lstrip(".")
            for leaves, paths in self.names.items()
            for path in paths
            for leaf in leaves.split(" ")
        ]


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """A value that the module held at the instant, and that its constructor does not make.

    Attributes:
        module: the submodule's path.
        path: from there to the value, steps of ``["attribute", name]``, ``["key", encoded]`` or
            ``["index", number]``; an attribute first.
        value: encoded as in a batch tree.
    """

    module: str
    path: tuple[Any, ...]
    value: Any


@dataclass(frozen=True, kw_only=True)
class MissingRecord:
    """State of the run that the bundle lacks.

    Attributes:
        where: its path, such as ``model.tokenizer``.
        why: what stands in the way, with what to do about it.
    """

    where: str
    why: str


@dataclass(frozen=True, kw_only=True)
class BuiltRecord:
    """How to rebuild an object of the user's, and the state it was in.

    Attributes:
        target: ``package.module:Class``.
        file: its source file relative to the repository; None for installed code.
        arguments: of the constructor, encoded as in a batch tree.
        unwritten: arguments that could not be written, each with the reason.
        instantiator: a function that is called with the class and the arguments instead, since those are configuration.
        state: attributes of any depth that are otherwise than the constructor makes them.
        missing: state that is not in the bundle: nothing proves then that a replay is the step that was captured.
    """

    target: str
    file: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    instantiator: str | None = None
    state: tuple[StateRecord, ...] = ()
    missing: tuple[MissingRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModuleRecord(BuiltRecord):
    """How to rebuild the module, and the state it was in besides its tensors.

    Attributes:
        factory: ``package.module:function`` that returns the module, called without arguments.
        eval_mode: submodules that were in eval mode.
        frozen: parameters that did not require a gradient.
        compiled: submodules that were compiled with ``torch.compile``.
        synchronized: batch norms whose statistics were taken over several ranks, and so are not the batch's own.
        changed_before_copy: names of weights that the step had already changed when they were copied.
        resized: buffers that code makes in another size, or not at all, when the module is built.
        added: buffers for which there is no place in a module that is built: they were registered later.
        initial: weights that are not stored, but left as the code makes them.
    """

    factory: str | None = None
    factory_file: str | None = None
    eval_mode: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    synchronized: tuple[str, ...] = ()
    changed_before_copy: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    initial: InitialRecord | None = None
    layouts: Layouts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerRecord:
    """The Trainer's settings and counters at the instant.

    Attributes:
        framework: the package the Trainer came from, ``lightning.pytorch`` or ``pytorch_lightning``.
        num_training_batches: micro-batches an epoch; None where the loader did not say.
        total_batch_idx: micro-batches since fit began, at the first of the window.
        last_batch: whether the window's last micro-batch was the epoch's last.
        guilty_step: which of the window's optimizer steps went wrong, from 0; manual optimisation may make several.
        autocasts: whether mixed precision was meant for the module's kind of device, and not by default for CUDA.
        logger: whether there was one.
    """

    framework: str
    precision: str
    accumulate_grad_batches: int
    automatic_optimization: bool
    global_step: int
    epoch: int
    total_batch_idx: int
    num_training_batches: int | None
    last_batch: bool
    guilty_step: int = 0
    autocasts: bool = True
    max_epochs: int | None
    max_steps: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    logger: bool
    strategy: str
    world_size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class FetchRecord:
    """A batch that the step took from ``dataloader_iter``: what came with it, and the random states right after."""

    batch_idx: int
    dataloader_idx: int
    rng: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        batch_idx: its index in the epoch; that of the first batch that a step took from ``dataloader_iter``.
        tree: the batch, tensors by name; of such a step a tuple of all that it took.
        hook: random states as the module's own ``on_after_batch_transfer`` was entered: the batch is the one from
            before that hook, which runs again. None where the batch is as the step got it, and the hook does not run.
        fetches: of a step that takes ``dataloader_iter``, one for each item of the tuple; None of any other.
        exhausted: whether such a step then found the iterator at its end.
        number: the loop's own, where it is not `batch_idx`.
    """

    batch_idx: int
    tree: Any
    hook: dict[str, Any] | None = None
    fetches: tuple[FetchRecord, ...] | None = None
    exhausted: bool = False
    number: int | None = None


def own_number(micro: MicroBatch) -> int:
    """The loop's own of a micro-batch."""
    return micro.batch_idx if micro.number is None else micro.number


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """The window's micro-batches, in order."""

    window: tuple[MicroBatch, ...]
    layouts: Layouts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RngRecord:
    """Random states, one entry per micro-batch of the window."""

    instants: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """Optimizer state before the update.

    Attributes:
        states: one tree per optimizer, as ``state_dict()`` gives it.
        constant: per optimizer and group, hyperparameters that had not changed since fit began: code, and so today's.
    """

    states: tuple[Any, ...]
    constant: tuple[tuple[tuple[str, ...], ...], ...] = ()
    layouts: Layouts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """The commit that was checked out, if any; and the folder of code that lay elsewhere, to tell people of."""

    commit: str | None = None
    dirty: bool | None = None
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and hash of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PinRecord:
    """How the bundle was pinned. `known`: the fault is open, a strict xfail."""

    known: bool = False


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of ``bundle.json``; `datamodule`: what the loop calls so, where there was one for the module to read."""

    fault: Fault
    module: ModuleRecord
    trainer: TrainerRecord
    numerics: dict[str, Any]
    rng: RngRecord
    batch: BatchRecord
    files: dict[str, FileRecord]
    code: CodeRecord
    environment: dict[str, Any]
    datamodule: BuiltRecord | None = None
    optimizer: OptimizerRecord | None = None
    pin: PinRecord | None = None

    @property
    def device(self) -> str:
        """The device captured on, such as ``cpu`` or ``cuda:1``."""
        return str(self.environment.get("device", "cpu"))

    @property
    def device_kind(self) -> str:
        """The kind of device captured on, such as ``cpu`` or ``cuda``."""
        return self.device.partition(":")[0]

    def dumps(self) -> str:
        """The text of ``bundle.json``: strict JSON, sorted keys, a line each."""
        data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        data["state_sha256"] = state_hash(data)
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


_STATE_SECTIONS = ("batch", "files", "numerics", "optimizer", "rng", "trainer")


def state_hash(data: dict[str, Any]) -> str:
    """Of the sections that decide what a replay computes; the others people may edit after a refactoring."""
    state = {name: data.get(name) for name in _STATE_SECTIONS}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
