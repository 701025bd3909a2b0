"""``replay``: one bundle, one Trainer, one verdict; and no trace left in the process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from pytest_nancapture.bundle import numerics, rng
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Manifest
from pytest_nancapture.bundle.tensors.names import submodules, unique_parameters
from pytest_nancapture.bundle.text import some
from pytest_nancapture.diagnose.blame import culprit_of
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.given import given_fault, given_number
from pytest_nancapture.diagnose.healing import Healing
from pytest_nancapture.diagnose.raised import judge_raise, raised
from pytest_nancapture.diagnose.source import package_folder
from pytest_nancapture.diagnose.trace import Trace, traced
from pytest_nancapture.errors import MismatchError, RebuildError
from pytest_nancapture.loops.loop import Loop, loop_named
from pytest_nancapture.replay.device import choose_device
from pytest_nancapture.replay.hooks import ReplayHooks
from pytest_nancapture.replay.initial import Fingerprint, other_initial
from pytest_nancapture.replay.resolve import resolver_for
from pytest_nancapture.replay.result import ReplayResult, Verdict
from pytest_nancapture.replay.verdict import judge, names_of
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.finding import Finding, surfaces_in
from pytest_nancapture.step.rebuild import build_module, materialize, other_dtypes
from pytest_nancapture.step.scene import Source, read_content, set_scene, stored_in


def run_replay(
    bundle: str | PathLike[str] | Bundle,
    *,
    module: Any = None,
    device: str = "auto",
    trace: bool = False,
    hooks: ReplayHooks | None = None,
) -> ReplayResult:
    """See :func:`pytest_nancapture.replay`."""
    start = time.perf_counter()
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    opened.verify()
    target = choose_device(device, opened.manifest)
    hooks = hooks or ReplayHooks()
    with traceless() as folder:
        run = Replay(opened, target, hooks, folder)
        result = run.run(module, trace=trace)
        if run.error is not None and not trace:  # over what, only the operations tell
            result = Replay(opened, target, hooks, folder).run(module, trace=True)
        if result["verdict"] == "finite" and opened.manifest.module.compiled and module is None:
            again = Replay(opened, target, hooks, folder).run(None, compiled=True)
            passed = again["verdict"] == "finite"
            note = "finite without torch.compile" + (" and with it" if passed else "; this is the replay with it")
            result = {**again, "notes": (*again["notes"], note)}
    return ReplayResult(device=str(target), seconds=time.perf_counter() - start, **result)


class Replay:
    """One run of the step; the bundle's tensors are read for it alone, since the step may change them.

    Attributes:
        finding: what the step was seen to do; None until it ran, or where it did not come to its end.
        stepped: the module that ran it, as it was left.
        trace: of the operations, if one was asked for.
        initial: of the weights that were left to the code's initialiser, as the step began with them.
        error: what the step raised, instead of coming to its end.
    """

    def __init__(
        self, bundle: Bundle, device: torch.device, hooks: ReplayHooks, folder: str, source: Source | None = None
    ) -> None:
        """`source` gives the tensors, instead of the bundle's folder."""
        self._bundle = bundle
        self._content = content = read_content(bundle, device, source or stored_in(bundle.path))
        self.finding: Finding | None = None
        self.stepped: Any = None
        self.trace: Trace | None = None
        self.initial: Fingerprint | None = None
        self.error: Exception | None = None
        self._others = ""
        self._engine: Engine | None = None
        self._device = device
        self._is_given = False
        self._hooks = hooks
        self._folder = folder
        self._resolver = resolver_for(bundle)
        self._decoder = content.decoder(self._resolver)

    def run(
        self, module: Any, *, compiled: bool = False, trace: bool = False, heals: Healing | None = None
    ) -> dict[str, Any]:
        """The fields of the result but device and seconds; for `heals` see :class:`Trace`."""
        manifest, notes = self._bundle.manifest, self._notes()
        blamed = {name: self._content.weights[name] for name in manifest.fault.weights if name in self._content.weights}
        given: Culprit | None = None
        try:
            given = given_fault(blamed, self._content.batch)
            # What a hook of the module's makes of bad values, only a trace can tell.
            certain = given_fault(blamed, self._content.given(manifest.batch))
            step = self.module(module)
            if trace or heals is not None:
                self.trace = Trace(step, self._content.batch, package_folder(step), heals=heals)
            engine = self._play(step, compiled=compiled)
        except MismatchError as error:
            return self._without_verdict("mismatch", str(error), notes)
        except RebuildError as error:
            return self._without_verdict("error", str(error), notes, error.detail)
        except Exception as error:  # whatever the user's code raises is the verdict, not our failure
            return self._judge_error(error, given if trace else None, notes)
        finding = self.finding = engine.finding
        self.stepped = step
        if finding is None:
            return self._without_verdict("error", "training ended before the captured step was over", notes)
        notes = (*notes, *filter(None, [other_dtypes(step, self._content.weights), self._other_draws(engine)]))
        found = judge(
            finding,
            manifest.fault,
            guilty_position(manifest),
            certain,
            raw=engine.raw,
            updated=engine.updated,
            others=self._others,
            # Whoever builds the module with a hook, or gives one, answers for what it holds.
            missing=() if self._is_given else manifest.module.missing,
        )
        notes = (*notes, *found.notes)
        culprit = found.culprit
        if self.trace is not None and culprit is not None:
            culprit = culprit_of(self.trace, step, finding, engine.losses) or culprit
            if given is not None and culprit == Culprit(phase=given.phase):
                # Explained by its values, of which the trace knows nothing.
                culprit = given
        if culprit is not None:
            culprit = given_number(culprit, engine.bad_numbers)
        losses = [loss.double().sum().item() for losses in engine.losses for loss in losses]
        return {
            "verdict": found.verdict,
            "loss": sum(losses) if losses else None,
            "nonfinite": found.nonfinite,
            "culprit": culprit,
            "reason": found.reason,
            "notes": notes,
        }

    def module(self, module: Any = None) -> Any:
        """The one given, or one built, its weights yet to be loaded.

        Raises:
            RebuildError: it cannot be built, or the loop cannot run it.
        """
        # Whoever builds it does so in the captured default dtype.
        numerics.apply(self._bundle.manifest.numerics)
        initial = self._bundle.manifest.module.initial
        if initial is not None:
            rng.RandomStates.seeded(initial.seed).restore()
        with self._loop.quiet():
            if module is None and self._hooks.module is not None:
                module = self._hooks.module(self._bundle)
            self._is_given = module is not None
            if module is None:
                module = build_module(
                    self._bundle.manifest.module, self._decoder, self._resolver, self._loop.check_class
                )
                materialize(module, self._content.weights)
                return module
        self._loop.check_class(type(module), "the module given")
        return module

    @property
    def _loop(self) -> Loop:
        return loop_named(self._bundle.manifest.trainer.framework)

    def _play(self, module: Any, *, compiled: bool) -> Engine:
        scene = set_scene(
            self._bundle.manifest,
            module,
            self._content,
            self._decoder,
            device=self._device,
            folder=self._folder,
            batch=self._batch,
            restored=partial(self._note_initial, module),
            trace=self.trace,
            fitted=_compile(module, self._bundle.manifest.module.compiled) if compiled else None,
            overrides=(self._hooks.trainer_kwargs and self._hooks.trainer_kwargs(self._bundle)) or {},
        )
        self._engine = scene.engine
        with self._loop.quiet(), traced(self.trace):
            self._loop.play(scene)
        return scene.engine

    def _judge_error(self, error: Exception, given: Culprit | None, notes: tuple[str, ...]) -> dict[str, Any]:
        """An exception over a value that is not finite is the fault itself; any other is an error."""
        self.error, engine, fault = error, self._engine, self._bundle.manifest.fault
        reason, detail = f"the step raised {raised(error)}", _user_traceback(error)
        if self.trace is None or self.trace.heals is not None or engine is None:
            return self._without_verdict("error", reason, notes, detail)
        behind = judge_raise(engine, self.trace, error, dict(unique_parameters(engine.module)).values())
        finding = engine.finding
        assert finding is not None
        if not finding.found_in:
            return self._without_verdict("error", reason, notes, detail)
        self.finding, self.stepped = finding, engine.module
        culprit = culprit_of(self.trace, engine.module, finding, engine.losses, behind)
        if given is not None and culprit == Culprit(phase=given.phase):
            culprit = given
        as_before = fault.raised is not None and fault.raised.type == raised(error).type
        return {
            "verdict": "nonfinite",
            "loss": None,
            "nonfinite": names_of(finding),
            "culprit": culprit or Culprit(phase=surfaces_in(finding)),
            "reason": f"raises {'as at capture: ' if as_before else ''}{raised(error)}",
            "detail": detail,
            "notes": notes,
        }

    def _note_initial(self, module: Any) -> None:
        """Whether weights that were left to the code are those that the fault was seen with."""
        record = self._bundle.manifest.module
        if record.initial is not None:
            self.initial = Fingerprint.of(module, record.initial)
            self._others = other_initial(record.initial, self.initial)

    def _batch(self, tree: Any) -> Any:
        batch = self._decoder.decode(tree)
        changed = self._hooks.batch(self._bundle, batch) if self._hooks.batch is not None else None
        return batch if changed is None else changed

    def _notes(self) -> tuple[str, ...]:
        """What a reader should know before trusting the verdict."""
        manifest, notes = self._bundle.manifest, []
        if manifest.device_kind != self._device.type:
            where = f"captured on {manifest.device_kind}, replayed on {self._device.type}"
            notes.append(f"{where}: kernels and random numbers differ")
        if manifest.trainer.world_size > 1:
            notes.append(
                f"captured on rank {manifest.trainer.rank} of {manifest.trainer.world_size}, replayed on one device"
            )
        if manifest.module.synchronized:
            norms = some(manifest.module.synchronized)
            notes.append(f"the statistics of {norms} were taken over all ranks, here over this rank's batch alone")
        if manifest.module.changed_before_copy:
            notes.append("the step had changed weights before they could be copied")
        return tuple(notes)

    def _other_draws(self, engine: Engine) -> str:
        """What another torch may mean for this step: operations may make other numbers of the same generator."""
        versions = self._bundle.manifest.environment.get("versions")
        captured = str(versions.get("torch", "")) if isinstance(versions, dict) else ""
        if not engine.draws or not captured or captured.split(".")[:2] == torch.__version__.split(".")[:2]:
            return ""
        return (
            f"captured with torch {captured}, replayed with {torch.__version__}, and the step draws random numbers: "
            "they may be others, and the fault may be gone for that alone"
        )

    def _without_verdict(
        self, verdict: Verdict, reason: str, notes: tuple[str, ...], detail: str = ""
    ) -> dict[str, Any]:
        fields = {"verdict": verdict, "reason": reason, "detail": detail, "notes": notes}
        return {**fields, "loss": None, "nonfinite": (), "culprit": None}


def guilty_position(manifest: Manifest) -> int:
    """Of the guilty micro-batch in the window."""
    window = [batch.batch_idx for batch in manifest.batch.window]
    return window.index(manifest.fault.batch_idx) if manifest.fault.batch_idx in window else len(window) - 1


@contextmanager
def traceless() -> Iterator[str]:
    """Yields an empty folder; random states, numeric settings, paths and filters are put back."""
    path, here, grad = list(sys.path), Path.cwd(), torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(rng.preserved())
        stack.enter_context(numerics.preserved())
        stack.enter_context(warnings.catch_warnings())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nancapture-", ignore_cleanup_errors=True))
        torch.set_grad_enabled(True)
        try:
            yield folder
        finally:
            torch.set_grad_enabled(grad)
            sys.path[:] = path
            os.chdir(here)


def _compile(module: Any, names: tuple[str, ...]) -> Any:
    """Compile what was compiled at capture, unless the module's own code has done so."""
    modules = dict(submodules(module))
    for name in names:
        if name and name in modules and getattr(modules[name], "_compiled_call_impl", None) is None:
            modules[name].compile()
    return torch.compile(module) if "" in names else module


def _user_traceback(error: Exception) -> str:
    """From the first frame of the user's own code on."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).resolve().parents[1]
    library = ("site-packages", "lightning", "torch")
    first = next(
        (
            i
            for i, frame in enumerate(frames)
            if not Path(frame.filename).is_relative_to(ours)
            and not any(part in Path(frame.filename).parts for part in library)
        ),
        0,
    )
    return "".join([*traceback.format_list(frames[first:]), *traceback.format_exception_only(error)]).rstrip()
