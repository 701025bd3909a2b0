"""A fault's readable name, for the folder it is pinned in: ``resnet50-div-zero-count``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from pytest_nancapture.bundle.manifest import Manifest
from pytest_nancapture.shrink.pinning.variable import guilty_variable

_LONGEST, _LONGEST_MODULE, _LONGEST_VARIABLE = 60, 28, 20
_WORD = re.compile(r"[A-Z0-9]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_LEADING = {"lit", "pl", "lightning", "my", "base"}
_TRAILING = {"lit", "pl", "lightning", "module", "model", "wrapper"}
_GENERIC_CLASS = {
    *_LEADING, *_TRAILING, "net", "network", "nn", "classifier", "regressor", "system", "task", "trainer", "learner",
    "experiment", "toy", "demo", "simple", "tiny", "test",
}  # fmt: skip
_GENERIC_PLACE = {
    *_GENERIC_CLASS, "models", "modules", "nets", "networks", "src", "lib", "code", "core", "main", "init", "train",
    "training", "run", "script", "scripts", "example", "examples", "app", "python", "project", "tests", "utils",
    "tasks", "systems", "lightning_module", "lightning_model",
}  # fmt: skip
_FAULT_WORDS = (
    (r"root of a negative|negative (value|in)\b", "negative"),
    (r"overflow", "overflow"),
    (r"entirely -inf|nothing but -inf", "empty-row"),
    (r"targets are ignored", "ignored"),
    (r"over 0 elements", "empty"),
    (r"unbiased spread of", "single"),
    (r"outside of \[|at -1 and 1", "edge"),
    (r"two (singular|eigen)\s?values are equal", "equal"),
    (r"inf - inf|0 \* inf|\d Inf among", "inf"),
    (r"0 / 0|by zero|\bat 0\b|\bof 0\b|\b0 in\b|\b0 to a negative", "zero"),
    (r"\d NaN among", "nan"),
)
"""What an explanation speaks of, and the word for it; the first that fits counts."""
_OP_ENDS = r"(_backward_data|_forward|_backward|_interface|_for_cpu)$"
_OP_BEGINS = r"^(_|native_|cudnn_|miopen_|linalg_|special_|foreach_|fused_)+"
_OP_WORDS = (("scaled_dot_product", "attention"), ("to_copy", "cast"))


def readable_name(manifest: Manifest, culprit: Mapping[str, Any] | None) -> str:
    """Letters, digits and dashes, at most 60: the module, then the operation, the fault and the variable.

    Args:
        manifest: of the bundle.
        culprit: as ``ReplayResult.as_dict`` gives it; where it names nothing, the step's number takes its place.
    """
    culprit = culprit or {}
    phase, op, source = (_text(culprit, key) for key in ("phase", "op", "source"))
    if phase in ("input", "weights") and not op:
        what = [phase, fault_word(culprit, manifest.fault.kind), _tensor(_text(culprit, "explanation"))]
    elif op:
        short = short_op(op)
        variable = guilty_variable(source, _columns(culprit), short)
        gradient = "grad" if _text(culprit, "explanation").startswith("the gradient of") else ""
        what = [short, gradient, fault_word(culprit, manifest.fault.kind), variable[:_LONGEST_VARIABLE]]
    elif source and (variable := guilty_variable(source, _columns(culprit), "")):
        what = [manifest.fault.kind, variable[:_LONGEST_VARIABLE]]
    else:
        what = [f"step-{manifest.fault.global_step}"]
    words = [_cut(module_word(manifest.module.target, manifest.module.file), _LONGEST_MODULE), *what]
    return _cut("-".join(slug for word in words if (slug := _slug(word))), _LONGEST)


def module_word(target: str, file: str | None) -> str:
    """The class's name in kebab case or, where that says nothing, that of its file or of a folder above it.

    Example:
        >>> module_word("shop.model:LitResNet50", "shop/model.py"), module_word("shop.model:Net", "shop/model.py")
        ('resnet50', 'shop')
    """
    module, _, path = target.partition(":")
    words = _kebab(path.rpartition(".")[2])
    while len(words) > 1 and words[0] in _LEADING:
        words = words[1:]
    while len(words) > 1 and words[-1] in _TRAILING:
        words = words[:-1]
    if not set(words) <= _GENERIC_CLASS:
        return _fused(words)
    parts = PurePosixPath(file).with_suffix("").parts if file else module.split(".")
    for part in reversed(parts):
        if _slug(part) and not set(_kebab(part)) <= _GENERIC_PLACE and part.strip("_") not in _GENERIC_PLACE:
            return _fused(_kebab(part))
    return _fused(words) or "module"


def short_op(op: str) -> str:
    """``div`` of ``aten.div_.Tensor``."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    for part, word in _OP_WORDS:
        if part in name:
            return word
    return re.sub(_OP_ENDS, "", re.sub(_OP_BEGINS, "", name)).strip("_")


def fault_word(culprit: Mapping[str, Any], kind: str) -> str:
    """One word for what the explanation tells, `kind` (nan or inf) where it tells none."""
    text = _text(culprit, "explanation")
    return next((word for pattern, word in _FAULT_WORDS if re.search(pattern, text)), kind)


def _tensor(explanation: str) -> str:
    """The last two parts of the tensor's name that an explanation of given values begins with."""
    name = re.split(r" h(?:olds|eld) ", explanation)[0] if re.search(r" h(olds|eld) ", explanation) else ""
    parts = re.findall(r"\w+", name)
    return "-".join(parts[1:][-2:] or parts[-2:])


def _kebab(name: str) -> list[str]:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return [word.lower() for word in _WORD.findall(plain)]


def _fused(words: Iterable[str]) -> str:
    """``res-net50`` is nobody's spelling."""
    return re.sub(r"(?<=[a-z0-9])-(net)(?![a-z])", r"\1", "-".join(words))


def _slug(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def _cut(slug: str, limit: int) -> str:
    """Whole words as long as they fit."""
    return slug if len(slug) <= limit else slug[: limit + 1].rpartition("-")[0] or slug[:limit]


def _columns(culprit: Mapping[str, Any]) -> tuple[int, int]:
    match culprit.get("columns"):
        case [int(first), int(last)]:
            return first, last
    return 0, 0


def _text(culprit: Mapping[str, Any], key: str) -> str:
    value = culprit.get(key)
    return value if isinstance(value, str) else ""
