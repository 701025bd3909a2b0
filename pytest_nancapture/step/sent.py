"""What a step itself sends to other ranks: where it gathers embeddings, one rank's bad values become everybody's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from pytest_nancapture.step.check import all_finite

_INPUTS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce", "broadcast", "send"), 0),
        **dict.fromkeys(("allgather", "_allgather_base", "allgather_coalesced", "gather"), 1),
        **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "scatter"), 1),
        **dict.fromkeys(("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"), 1),
    }
)
"""Methods of a process group -> which argument is what this rank brings; the others are to be written."""


_OTHERS = ("barrier", "monitored_barrier", "recv", "recv_anysource")


class NeedsOthersError(RuntimeError):
    """A step that runs on one rank alone spoke to the others."""


@dataclass
class Sent:
    """What one rank brought to the collectives of a step.

    Attributes:
        count: of collectives so far; ranks that run the same step count alike.
        first_bad: which was the first to which this rank brought something not finite, from 1 up; 0 for none.
    """

    count: int = 0
    first_bad: int = 0

    def note(self, brought: Any) -> None:
        """One more collective."""
        self.count += 1
        if not self.first_bad and not all_finite(list(_tensors(brought))):
            self.first_bad = self.count


@contextmanager
def watched() -> Iterator[Sent]:
    """Look at what this rank brings to every collective that is called meanwhile."""
    sent = Sent()
    with ExitStack() as stack:
        # Asked for by getattr, what makes methods of these functions would be lost.
        methods = vars(dist.ProcessGroup) if dist.is_available() and dist.is_initialized() else {}
        for name, original in [(name, methods[name]) for name in _INPUTS if name in methods]:
            stack.callback(setattr, dist.ProcessGroup, name, original)
            setattr(dist.ProcessGroup, name, _noting(getattr(dist.ProcessGroup, name), _INPUTS[name], sent))
        yield sent


@contextmanager
def refused() -> Iterator[None]:
    """Let nothing wait for other ranks, which may be gone: collectives raise :class:`NeedsOthersError` instead."""
    with ExitStack() as stack:
        methods = vars(dist.ProcessGroup) if dist.is_available() and dist.is_initialized() else {}
        for name, original in [(name, methods[name]) for name in (*_INPUTS, *_OTHERS) if name in methods]:
            stack.callback(setattr, dist.ProcessGroup, name, original)
            setattr(dist.ProcessGroup, name, _refuse)
        yield


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NeedsOthersError("the step speaks to other ranks, which may not be there to answer")


def _noting(original: Callable[..., Any], position: int, sent: Sent) -> Callable[..., Any]:
    @wraps(original)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [options.rootRank for options in args if isinstance(options, dist.BroadcastOptions)]
        is_mine = not roots or roots[0] == group.rank()
        sent.note(args[position] if is_mine and position < len(args) else ())
        return original(group, *args, **kwargs)

    return collective


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
