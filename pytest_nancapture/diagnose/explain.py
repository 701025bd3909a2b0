"""Why an operation put out NaN or Inf, in a sentence made from its values, with the usual remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.text import some

Explainer = Callable[["Call"], str]


@dataclass(frozen=True)
class Call:
    """An operation with its values: `args` from before it wrote into them, `output` the first that is not finite."""

    args: list[Any]
    kwargs: Mapping[str, Any]
    output: Tensor


def explain(op: str, args: Any, kwargs: Mapping[str, Any], output: Tensor) -> str:
    """One sentence; empty where nothing can be said.

    Args:
        op: such as ``aten.div.Tensor``.
        args: of the operation, before it wrote into them.
        output: the first that is not finite.
    """
    name = op.removeprefix("aten.").partition(".")[0].rstrip("_").lstrip("_")
    explainer = _EXPLAINERS.get(name, _generic)
    try:
        call = Call(list(args), kwargs, output)
        return explainer(call) or _generic(call)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return ""


def explain_gradient(op: str, args: Any, kwargs: Mapping[str, Any], output: Tensor) -> str:
    """Why the gradient of an operation is not finite, from one of the operations that compute it.

    Args:
        op: the forward operation.
        args: of the one in the backward.
    """
    name = op.removeprefix("aten.").partition(".")[0].strip("_")
    divisor = args[1] if len(args) > 1 and isinstance(args[1], Tensor) and args[1].shape == output.shape else None
    zeros = _where(divisor == 0) if divisor is not None else ""
    if name in _STEEP:
        what, remedy = _STEEP[name]
        where = f" (in {zeros})" if zeros else ""
        return f"the gradient of {name.removeprefix('linalg_')} {what}{where}; {remedy}"
    why = explain("", args, kwargs, output) if not zeros else f"division by zero in {zeros}"
    return f"the gradient of {name} is not finite: {why}"


_STEEP = {
    "sqrt": ("at 0 is infinite", "add an eps under the root"),
    "pow": ("at 0 is infinite for a power below 1", "add an eps to the base"),
    "acos": ("at -1 and 1 is infinite", "clamp to the open interval"),
    "asin": ("at -1 and 1 is infinite", "clamp to the open interval"),
    "log": ("at 0 is infinite", "clamp before the logarithm, also in branches that where() does not take"),
    "log2": ("at 0 is infinite", "clamp before the logarithm, also in branches that where() does not take"),
    "xlogy": ("at 0 is infinite", "keep both arguments above 0"),
    "logsumexp": ("over nothing but -inf is NaN", "use a large negative number in place of -inf"),
    "linalg_svd": ("is infinite where two singular values are equal", "do not differentiate single singular vectors"),
    "linalg_eigh": ("is infinite where two eigenvalues are equal", "do not differentiate single eigenvectors"),
    "linalg_vector_norm": ("at 0 is not finite", "add an eps under the root"),
    "norm": ("at 0 is not finite", "add an eps under the root"),
}
"""Where gradients of common functions end, and the usual remedy."""


def _division(call: Call) -> str:
    divisor = call.args[1]
    if not isinstance(divisor, Tensor):
        return "division by zero: the divisor is 0" if divisor == 0 else ""
    zeros = _where(divisor == 0)
    if zeros:
        both = isinstance(call.args[0], Tensor) and bool(((call.args[0] == 0) & (divisor == 0)).any())
        kind = "0 / 0" if both else "division by zero"
        return f"{kind}: the divisor is 0 in {zeros}; keep it above 0, as with clamp(min=...)"
    return _overflow(call)


def _reciprocal(call: Call) -> str:
    zeros = _where(call.args[0] == 0)
    return f"division by zero: the divisor is 0 in {zeros}; keep it above 0, as with clamp(min=...)" if zeros else ""


def _logarithm(call: Call) -> str:
    zeros, negative = _where(call.args[0] == 0), _where(call.args[0] < 0)
    parts = [f"0 in {zeros}"] if zeros else []
    parts += [f"negative in {negative}"] if negative else []
    return f"logarithm of what is not positive: {', '.join(parts)}; add an eps or clamp" if parts else ""


def _root(call: Call) -> str:
    negative, zeros = _where(call.args[0] < 0), _where(call.args[0] == 0)
    if negative:
        return (
            f"root of a negative value: {negative} below 0 (the least is {_number(call.args[0].min())}); clamp(min=0)"
        )
    return f"1 / root of 0: {zeros} 0; add an eps under the root" if zeros else ""


def _exponential(call: Call) -> str:
    limit = math.log(torch.finfo(call.output.dtype).max)
    top = _number(call.args[0].max())
    return (
        f"exp overflows {_dtype(call.output)} above {limit:.4g}: the largest input is {top}; clamp it or scale it down"
    )


def _power(call: Call) -> str:
    base, exponent = call.args[0], call.args[1]
    if isinstance(base, Tensor) and isinstance(exponent, (int, float)) and exponent < 0 and _where(base == 0):
        return f"0 to a negative power in {_where(base == 0)}"
    if isinstance(base, Tensor) and _where(base < 0) and isinstance(exponent, float) and not exponent.is_integer():
        return f"negative value to a fractional power in {_where(base < 0)}"
    return _overflow(call)


def _softmax(call: Call) -> str:
    empty = (call.args[0] == -math.inf).all(dim=call.args[1])
    if bool(empty.any()):
        rows = some([str(i) for i in empty.flatten().nonzero().flatten().tolist()])
        return f"softmax over a row that is entirely -inf: row {rows} of {empty.numel()}; leave an entry in each"
    return ""


def _spread(call: Call) -> str:
    reduced = call.args[0].numel() // max(call.output.numel(), 1)
    if reduced <= 1:
        return f"unbiased spread of {reduced} value: use the biased one, or more values"
    return ""


def _nll(call: Call) -> str:
    ignored = call.args[4] if len(call.args) > 4 else -100
    if bool((call.args[1] == ignored).all()):
        return "all targets are ignored: a mean over 0 elements; divide the sum by the number of targets, at least 1"
    return ""


def _mean(call: Call) -> str:
    return "mean over 0 elements" if not call.args[0].numel() else _overflow(call)


def _inverse_cosine(call: Call) -> str:
    outside = _where(call.args[0].abs() > 1)
    return f"outside of [-1, 1] in {outside}; clamp it" if outside else ""


def _subtraction(call: Call) -> str:
    left, right = (torch.as_tensor(value) for value in call.args[:2])
    if bool((left.isinf() & right.isinf()).any()):
        return "inf - inf: both are infinite at the same place"
    return _overflow(call)


def _product(call: Call) -> str:
    left, right = (torch.as_tensor(value) for value in call.args[:2])
    if bool(((left == 0) & right.isinf()).any()) or bool((left.isinf() & (right == 0)).any()):
        return "0 * inf: mask before the product, not by it"
    return _overflow(call)


def _xlogy(call: Call) -> str:
    zeros = _where(torch.as_tensor(call.args[1]) == 0)
    return f"logarithm of 0 in {zeros}; keep it above 0" if zeros else ""


def _overflow(call: Call) -> str:
    tensors = [
        value for value in call.args if isinstance(value, Tensor) and value.dtype.is_floating_point and value.numel()
    ]
    if not tensors or not call.output.dtype.is_floating_point or not bool(call.output.isinf().any()):
        return ""
    if not all(bool(value.isfinite().all()) for value in tensors):
        return ""
    top = max(_number(value.abs().max()) for value in tensors)
    limit = torch.finfo(call.output.dtype).max
    return f"overflow: {_dtype(call.output)} ends at {limit:.4g}, the largest input is {top} in size"


def _generic(call: Call) -> str:
    """The ranges of the inputs."""
    tensors = [value for value in call.args if isinstance(value, Tensor) and value.numel()]
    ranges = [f"{_number(v.min())} to {_number(v.max())}" for v in tensors if v.dtype.is_floating_point]
    nan = int(call.output.isnan().sum())
    what = f"{nan} NaN" if nan else f"{int(call.output.isinf().sum())} Inf"
    came = f" from inputs of {' and '.join(ranges)}" if ranges else ""
    return f"{what} among {call.output.numel()} values{came}"


def _where(mask: Any) -> str:
    """``3 of 20``; ``the only`` where there is but one."""
    count, total = int(mask.sum()), mask.numel()
    if total == 1 and count:
        return "its only place"
    return f"{count} of {total} places" if count else ""


def _number(value: Tensor) -> float:
    return float(f"{float(value):.4g}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_EXPLAINERS: dict[str, Explainer] = {
    "div": _division,
    "reciprocal": _reciprocal,
    "log": _logarithm,
    "log2": _logarithm,
    "log10": _logarithm,
    "sqrt": _root,
    "rsqrt": _root,
    "exp": _exponential,
    "expm1": _exponential,
    "pow": _power,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "std": _spread,
    "var": _spread,
    "var_mean": _spread,
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
    "mean": _mean,
    "acos": _inverse_cosine,
    "asin": _inverse_cosine,
    "sub": _subtraction,
    "mul": _product,
    "xlogy": _xlogy,
    "to_copy": _overflow,
    "mm": _overflow,
    "addmm": _overflow,
    "bmm": _overflow,
    "add": _overflow,
    "sum": _overflow,
}
