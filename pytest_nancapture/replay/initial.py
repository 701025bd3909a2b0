"""Weights that are left to the code's initialiser: are they those that the fault was seen with?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pytest_nancapture.bundle.manifest import InitialRecord
from pytest_nancapture.bundle.tensors.names import buffers, parameters
from pytest_nancapture.bundle.text import some

_CLOSE = 1e-4
"""What another processor's rounding may come to; another initialiser, or one draw more, is off by a thousand times."""
_PART = 2**20
"""Values that are looked at together: more would cost memory, and no less time."""
_CONSTANT = "constant"
_REMEDY = "pin it again with the code that has the fault: nancapture pin BUNDLE fixtures"


@dataclass(frozen=True)
class Fingerprint:
    """What a record keeps of its weights, in the order of their names.

    Attributes:
        sha256: over name, dtype, shape and bytes of each.
        sketch: since two processors may round the same initialiser's numbers otherwise, also what rounding hardly
            changes: a hash of those that hold one value all over, and of each of the others its place among the names,
            its dtype, shape, the root of the mean square, and the sum with fixed random weights.
    """

    sha256: str
    sketch: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, record: InitialRecord) -> Fingerprint:
        """Of the weights that the record names, as they are now in a module that has them."""
        now, digest = {**dict(parameters(module)), **dict(buffers(module))}, hashlib.sha256()
        names = sorted(record.all_names())
        for name in names:
            tensor = now[name].detach().cpu()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if digest.hexdigest() == record.sha256:
            return cls(record.sha256, record.sketch)
        return cls(digest.hexdigest(), tuple(_sketches([now[name].detach().cpu() for name in names])))


def other_initial(record: InitialRecord, now: Fingerprint) -> str:
    """Why the weights may not be those that the fault was seen with; empty where they are, but for rounding."""
    names = sorted(record.all_names())
    many = f"{len(names)} weights are left to the code's initialiser"
    if not record.sha256:
        return f"{many}, and this bundle is too old to say whether it makes the same ones still; {_REMEDY}"
    if now.sha256 == record.sha256:
        return ""
    before, after = _by_place(record.sketch), _by_place(now.sketch)
    wrong = [place for place in before.keys() | after.keys() if not _is_close(before.get(place), after.get(place))]
    if before and not wrong:
        return ""
    wrong = [names[int(place)] for place in sorted(wrong) if place.isdecimal() and int(place) < len(names)] or names
    return (
        f"{many}, which makes others than those that the fault was seen with ({some(wrong)}): another initialiser, "
        f"another draw before it, or another torch; {_REMEDY}"
    )


def _sketches(tensors: Iterable[Tensor]) -> Iterator[str]:
    constant = hashlib.sha256()
    for place, tensor in enumerate(tensors):
        values = tensor.reshape(-1)
        if values.numel() and bool((values == values[0]).all()):
            constant.update(f"{place} {tensor.dtype} {tuple(tensor.shape)} {values[0].item():.5g}\n".encode())
        else:
            yield f"{place} {_sketch(tensor)}"
    yield f"{_CONSTANT} {constant.hexdigest()[:16]}"


def _by_place(sketch: Iterable[str]) -> dict[str, str]:
    return {place: rest for place, _, rest in (line.partition(" ") for line in sketch)}


def _sketch(tensor: Tensor) -> str:
    values = tensor.reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    square = total = 0.0
    generator = torch.Generator().manual_seed(0)
    for part in torch.split(values, _PART):
        # Integers are drawn alike everywhere, and enough of them tell a one from another in a tensor of zeros and ones.
        weights = torch.randint(-1000, 1001, part.shape, generator=generator)
        square += part.double().square().sum().item()
        total += (part.double() * weights).sum().item() / 1000
    count = max(values.numel(), 1)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), "x".join(map(str, tensor.shape)) or "scalar"
    return f"{dtype} {shape} {math.sqrt(square / count):.7g} {total / math.sqrt(count):.7g}"


def _is_close(before: str | None, after: str | None) -> bool:
    """Two sketches of the same tensor; what is not finite is like nothing."""
    if before is None or after is None or before == after:
        return before == after and "nan" not in str(before)
    try:
        (*kind, first, second), (*other_kind, third, fourth) = before.split(" "), after.split(" ")
        size, total, other_size, other_total = map(float, (first, second, third, fourth))
    except ValueError:
        return False
    limit = _CLOSE * max(size, other_size)
    return kind == other_kind and abs(size - other_size) <= limit and abs(total - other_total) <= limit
