"""A bundle as text for people: its line in a table, and the page that ``nancapture show`` prints. Reads no tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pytest_nancapture.bundle.manifest import BATCH, BuiltRecord, Fault, MicroBatch, ModuleRecord, StateRecord
from pytest_nancapture.bundle.text import human_size, printable, some
from pytest_nancapture.bundle.values.outline import inline, made_of, outline, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_nancapture.bundle.bundle import Bundle

Row = tuple[str, str]


def headline(fault: Fault) -> str:
    """What went wrong, in a few words: ``nan in loss, gradients``, or ``nan, ValueError raised over it``."""
    places = ", ".join(place for place in fault.found_in if place != "raised")
    raised = f", {fault.raised.type} raised over it" if fault.raised is not None else ""
    return printable(f"{fault.kind}{f' in {places}' if places else '' if raised else ' in nothing named'}{raised}")


def reproduced(fault: Fault) -> str:
    """How often the fault came back when the bundle was replayed: ``1 of 1``."""
    return f"{fault.reproduced.runs} of {fault.reproduced.of}"


def device(bundle: Bundle) -> str:
    """The device captured on, such as ``cuda:0``."""
    return str(bundle.manifest.environment.get("device", "cpu"))


def table(bundles: Mapping[str, Bundle]) -> list[str]:
    """A line of headings and one for each bundle, by the name to show it under; empty where there is none."""
    rows = [("bundle", "step", "fault", "batch", "reproduced", "size", "device")]
    for name, bundle in bundles.items():
        fault = bundle.fault
        what = headline(fault) + (" (known)" if bundle.known else "")
        numbers = (str(fault.global_step), what, str(fault.batch_idx), reproduced(fault), human_size(bundle.size))
        rows.append((name, *numbers, printable(device(bundle))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return lines if bundles else []


def summary(bundle: Bundle) -> dict[str, Any]:
    """What the table says of one bundle, as JSON-ready values."""
    names = ("global_step", "epoch", "batch_idx", "kind", "found_in")
    return {
        "path": str(bundle.path),
        "damaged": None,
        **{name: getattr(bundle.fault, name) for name in names},
        "reproduced": dataclasses.asdict(bundle.fault.reproduced),
        "size": bundle.size,
        "device": device(bundle),
        "known": bundle.known,
    }


def page(bundle: Bundle) -> str:
    """Everything a person may want to know about a bundle.

    Raises:
        BundleDamagedError: the batch file is not a safetensors file.
    """
    manifest = bundle.manifest
    optimizers = manifest.optimizer.states if manifest.optimizer else ()
    sections: dict[str, Iterable[Row]] = {
        "fault": _fault_rows(bundle),
        "culprit": _rows(manifest.fault.culprit or {}),
        "module": _module_rows(bundle),
        "datamodule": _built_rows(manifest.datamodule) if manifest.datamodule else [],
        "weights from less": _recipes(manifest.module),
        "batch": _batch_rows(bundle),
        "random state": _seeds(bundle),
        "trainer": _rows(_readable(dataclasses.asdict(manifest.trainer))),
        "numerics": _rows(_readable(manifest.numerics)),
        "optimizer": [("states", str(len(optimizers)))] if optimizers else [],
        "code": _rows(dataclasses.asdict(manifest.code)),
        "environment": _rows(manifest.environment),
        "files": [
            (name, f"{human_size(record.bytes):>7}   sha256 {record.sha256:.12}")
            for name, record in sorted(manifest.files.items())
        ],
    }
    lines = [printable(f"{bundle.name}   {headline(manifest.fault)}   {human_size(bundle.size)}")]
    for name, rows in sections.items():
        lines += _section(name, list(rows))
    return "\n".join(lines)


def _section(name: str, rows: list[Row]) -> Iterator[str]:
    if rows:
        yield f"\n{name}"
        width = max(len(key) for key, _ in rows)
        yield from (printable(f"  {key:{width}}  {value}".rstrip()) for key, value in rows)


def _rows(values: dict[str, Any]) -> Iterator[Row]:
    for key, value in values.items():
        if value is not None and value != "":
            yield key.replace("_", " "), _value(value)


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    """Settings in words, where Lightning or torch write them as numbers that stand for something else."""
    unlimited = {name: "no limit" for name in ("max_steps", "max_epochs") if values.get(name) == -1}
    match values.get("deterministic_algorithms"):
        case [bool(on), bool(warn_only)]:
            asked = ("yes, only warning of others" if warn_only else "yes") if on else "no"
            return {**values, **unlimited, "deterministic_algorithms": asked}
    return {**values, **unlimited}


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _fault_rows(bundle: Bundle) -> Iterator[Row]:
    fault, gradients = bundle.fault, bundle.fault.gradients
    yield "what", headline(fault)
    yield "where", f"step {fault.global_step}, epoch {fault.epoch}, micro-batch {fault.batch_idx} of the epoch"
    if fault.raised is not None:
        yield "raised", str(fault.raised)
    yield "loss", some([loss or "none" for loss in fault.losses], 8) or "none recorded"
    named = f": {some(gradients.nonfinite)}" if gradients.nonfinite else ""
    yield "gradients", f"{len(gradients.nonfinite)} of {gradients.total} not finite{named}"
    # A shrunk bundle names only the non-finite ones.
    if gradients.total > len(gradients.nonzero) and (gradients.nonzero or not gradients.nonfinite):
        yield "", f"{gradients.total - len(gradients.nonzero)} of {gradients.total} all zero"
    if fault.healed is not None and fault.healed.idle:
        idle = fault.healed.idle
        yield "idle", f"{len(idle)}: {some(idle)}: this batch has nothing to teach them, so zeros are right"
    for key, names in (("buffers", fault.buffers), ("weights", fault.weights)):
        if names:
            yield key, f"{len(names)} not finite: {some(names)}"
    where = {"fresh": ", each in a fresh process", "here": ", in the training process"}.get(fault.reproduced.how, "")
    reruns = f"{reproduced(fault)} replays at capture{where}" if fault.reproduced.of else "not tried at capture"
    never = "" if fault.reproduced.runs else ": not shown to come back, so a test of it proves nothing yet"
    yield "reproduced", reruns + never
    if bundle.known:
        yield "pinned", "as a known, open fault: pytest expects it to fail"


def _module_rows(bundle: Bundle) -> Iterator[Row]:
    record = bundle.manifest.module
    if record.factory:
        yield "factory", record.factory + (f"   in {record.factory_file}" if record.factory_file else "")
    yield from _built_rows(record)
    if record.initial is not None:
        count, seed = len(record.initial.all_names()), record.initial.seed
        yield "initial", f"{count} weights are as the code makes them under seed {seed}"
    for key, names in (
        ("in eval mode", record.eval_mode),
        ("frozen", record.frozen),
        ("compiled", record.compiled),
        ("changed early", record.changed_before_copy),
    ):
        if names:
            yield key, f"{len(names)}: {some([name or 'the module itself' for name in names])}"


def _built_rows(record: BuiltRecord) -> Iterator[Row]:
    yield "target", record.target + (f"   in {record.file}" if record.file else "")
    for key, value in record.arguments.items():
        yield f"argument {key}", inline(value)
    for reason in record.unwritten:
        yield "not written", reason
    for state in record.state:
        yield f"state {_place(state)}", inline(state.value)
    for missing in record.missing:
        yield "missing", f"{missing.where}: {missing.why}"


def _seeds(bundle: Bundle) -> Iterator[Row]:
    window = bundle.manifest.batch.window
    for micro, instant in zip(window, bundle.manifest.rng.instants, strict=True):
        if "seed" in instant:
            yield f"micro-batch {micro.batch_idx}", f"seed {instant['seed']} of torch, numpy and python"


def _recipes(record: ModuleRecord) -> Iterator[Row]:
    for name, layout in record.layouts.items():
        if "recipe" in layout:
            yield name, f"{layout.get('dtype')} {layout.get('shape')}{made_of(layout)}"


def _batch_rows(bundle: Bundle) -> Iterator[Row]:
    record = bundle.manifest.batch
    shapes = tensor_shapes(bundle.path, BATCH, record.layouts)
    for micro in record.window:
        guilty = len(record.window) > 1 and micro.batch_idx == bundle.fault.batch_idx
        for depth, label, text in outline(micro.tree, shapes):
            key = "  " * depth + label if depth else f"micro-batch {micro.batch_idx}"
            yield key, text + ("" if depth else _whence(micro) + ("   <- the guilty one" if guilty else ""))


def _whence(micro: MicroBatch) -> str:
    """Where the step got it from, if not from the loader as it is."""
    if micro.fetches is not None:
        return f"   {len(micro.fetches)} taken by the step from dataloader_iter"
    return "   from before the module's on_after_batch_transfer" if micro.hook is not None else ""


def _place(state: StateRecord) -> str:
    """As code would reach it: ``encoder.counts['seen'][0]``."""
    text = state.module
    for step in state.path:
        kind, name = step if isinstance(step, list) and len(step) == 2 else ("", step)
        text += (f".{name}" if text else str(name)) if kind == "attribute" else f"[{inline(name)}]"
    return text
