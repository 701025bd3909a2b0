"""A step that raised: is a value that is not finite the reason?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from pytest_nancapture.bundle.manifest import Gradients, Raised
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.diagnose.blame import has_birth, has_given
from pytest_nancapture.diagnose.records import Origin, Record, graphs_behind, is_learned_in
from pytest_nancapture.diagnose.trace import Trace
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.finding import Part

_WIDTH = 300
"""Characters of a message; one may hold a whole tensor."""


def judge_raise(engine: Engine, trace: Trace | None, error: Exception, optimized: Iterable[Tensor]) -> Sequence[Origin]:
    """Look at a step that was ended by an exception.

    The engine's finding then says what is not finite, and whether the exception is over that.

    Args:
        trace: of the step; without one it is only known whether losses, gradients or buffers are bad.
        error: what the step raised.
        optimized: parameters whose gradients count.

    Returns:
        Where the bad values behind the exception came from.
    """
    engine.look(optimized)
    finding = engine.finding
    assert finding is not None
    with engine.unseen():
        suspects = trace.reads.behind(error, has_birth, is_learned_in) if trace is not None else []
        suspects = [suspect for suspect in suspects if has_birth(suspect.origin) or has_given(suspect.origin)]
    origins = [suspect.origin for suspect in suspects]
    if origins:
        kind = finding.kind if finding.found_in else "nan" if any(suspect.nan for suspect in suspects) else "inf"
        engine.finding = dataclasses.replace(
            finding,
            kind=kind,
            raised=raised(error),
            raised_in=_part(engine, origins),
            gradients=_with_weights(finding.gradients, engine.module, graphs_behind(origins)),
        )
    return origins


def _with_weights(gradients: Gradients, module: nn.Module, graphs: Iterable[Any]) -> Gradients:
    """Of a step that did not come to its gradients: the parameters that led to what it raised over would have some."""
    leaves = _leaves_of(graphs)
    names = tuple(name for name, parameter in unique_parameters(module) if id(parameter) in leaves)
    return gradients if gradients.nonfinite or not names else dataclasses.replace(gradients, nonzero=names)


def _leaves_of(graphs: Iterable[Any]) -> set[int]:
    todo, seen, leaves = list(graphs), set[Any](), set[int]()
    while todo:
        node = todo.pop()
        if isinstance(node, Tensor):
            leaves.add(id(node))
        elif node is not None and node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            todo += [node for node, _ in node.next_functions] if variable is None else [variable]
    return leaves


def raised(error: BaseException) -> Raised:
    """Its type, and the first line of its message."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error).strip()
    except Exception:  # of a class of somebody's
        text = ""
    return Raised(type=name, message=next(iter(text.splitlines()), "")[:_WIDTH])


def _part(engine: Engine, origins: Iterable[Origin]) -> Part:
    if engine.goes_on and engine.steps > engine.target:
        return "optimizer"
    # A second loss may be made after the backward pass of a first.
    in_backward = any(isinstance(origin, Record) and origin.is_backward for origin in origins)
    return "backward" if in_backward and any(engine.losses[-1:]) else "forward"
