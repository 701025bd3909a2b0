"""What makes a fault the same fault: seen in a traced replay, compared without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"-?\d[\d.e+-]*")
_KINDS = re.compile(r"\b(NaN|Inf)\b")


@dataclass(frozen=True, kw_only=True)
class SeenFault:
    """A replay, as far as it tells one fault from another.

    Attributes:
        result: ``ReplayResult.as_dict``.
        kind: of the loss, or else of the rest: ``nan`` or ``inf``; empty where nothing was seen.
        found_in: as in the bundle's own record.
        nonfinite: parameters whose gradients were not finite.
        nonzero: those whose gradients were not all zero.
        healed: parameters that have a gradient once every bad value becomes 0 where it is born, which is roughly what
            a fix will leave; None where that cannot be told.
        births: ``file:line`` of every line where a bad value was born of finite ones, whether or not it led to the
            fault.
        spares: whether there are good entries beside the bad ones in the batch.
        born: kinds of what was born at the culprit's operation and line.
        seconds: that the replay took.
    """

    result: dict[str, Any]
    kind: str = ""
    found_in: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    nonzero: tuple[str, ...] = ()
    healed: tuple[str, ...] | None = None
    births: tuple[str, ...] = ()
    born: tuple[str, ...] = ()
    spares: bool = True
    seconds: float = 0.0

    @property
    def is_red(self) -> bool:
        """Whether there is a fault at all."""
        return bool(self.result["verdict"] == "nonfinite")

    @property
    def culprit(self) -> dict[str, Any]:
        """What is to blame; empty where nothing was named."""
        return self.result.get("culprit") or {}


def difference(first: SeenFault, now: SeenFault) -> str:
    """Why `now` is not the fault of `first`, or no test of it; empty where it is.

    The culprit must be the same, born as the same kind, and surface in the same places and parameters. Bad values
    that are born where there were none before are latent faults: they would stay when this one is fixed. And what the
    fix leaves of the step must have gradients, or else the test would be vacuous then.
    """
    return unlike(first, now) or _vacuous(first, now)


def unlike(first: SeenFault, now: SeenFault) -> str:
    """The same, but for what is left when the fault is mended: that takes another replay to see."""
    if not now.is_red:
        return f"it is {now.result['verdict']}: {now.result.get('reason', '')}"
    return _other_culprit(first, now) or _other_symptoms(first, now) or _latent(first, now)


def _other_culprit(first: SeenFault, now: SeenFault) -> str:
    for key in ("phase", "op", "file", "line"):
        before, after = first.culprit.get(key), now.culprit.get(key)
        if before != after:
            return f"another {key}: {after or 'none'}, was {before or 'none'}"
    if not set(now.born) <= set(first.born):
        return f"{' and '.join(now.born)} was born there, not {' and '.join(first.born) or 'any'}"
    before, after = _cause(first), _cause(now)
    return f"another cause: {after or 'none'}, was {before or 'none'}" if before != after else ""


def _other_symptoms(first: SeenFault, now: SeenFault) -> str:
    if now.kind != first.kind:
        return f"{now.kind} in place of {first.kind}"
    main = {"loss", "gradients", "raised"}
    found, was = set(now.found_in), set(first.found_in)
    if found & main != was & main or not found <= was:
        return f"found in {', '.join(now.found_in)}, was in {', '.join(first.found_in)}"
    if set(now.nonfinite) != set(first.nonfinite):
        return "the gradients of other parameters are not finite"
    return "" if set(now.nonzero) == set(first.nonzero) else "other parameters have no gradient"


def _latent(first: SeenFault, now: SeenFault) -> str:
    new = sorted(set(now.births) - set(first.births))
    if new:
        return f"bad values are born in a place where none were: {new[0]}"
    return "no good entry is left in the batch" if first.spares and not now.spares else ""


def _vacuous(first: SeenFault, now: SeenFault) -> str:
    if first.healed is None or set(first.healed) <= set(now.healed or ()):
        return ""
    return "with the fault mended, fewer parameters would have a gradient"


def _cause(seen: SeenFault) -> str:
    """The explanation without what changes with the size of things; of what was given, which it is."""
    text = str(seen.culprit.get("explanation", ""))
    if seen.culprit.get("phase") in ("input", "weights") and not seen.culprit.get("op"):
        name, _, rest = re.sub(r" \(and \d+ more\)", "", text).partition(" h")
        return f"{name}: {' '.join(sorted(set(_KINDS.findall(rest))))}"
    return _NUMBER.sub("", re.split(r"[:;(,]", text)[0]).strip()
