"""One rank alone: what torch's data-parallel training does with the other ranks is left out while a step runs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def alone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gradients, buffers and statistics of these modules stay this rank's own; on leaving all is as it was.

    Other ranks' gradients would make their fault look like this rank's, and they may not be there to answer.
    """
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(_unreduced(module))
            elif isinstance(module, nn.SyncBatchNorm):
                stack.enter_context(_unsynchronized(module))
        yield


class _NoReducer:
    """In place of DDP's reducer, which therefore never hears that a backward pass is to come, and so reduces nothing.

    Also where the user's step switches synchronisation on and off by itself.
    """

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


@contextmanager
def _unreduced(wrapper: DistributedDataParallel) -> Iterator[None]:
    saved = dict(vars(wrapper))
    vars(wrapper).update(
        reducer=_NoReducer(),
        require_backward_grad_sync=False,
        require_forward_param_sync=False,
        forward_sync_buffers=False,
        # It would count a first pass that the reducer has not seen.
        _static_graph_delay_allreduce_enqueued=True,
    )
    try:
        yield
    finally:
        vars(wrapper).clear()
        vars(wrapper).update(saved)
        if wrapper.find_unused_parameters and not wrapper.static_graph:
            # Even so its hooks have noted what was used here, and the next backward pass may use less. It rebuilds no
            # buckets in this mode, so that nothing else of its state is lost.
            wrapper.reducer._reset_state()


@contextmanager
def _unsynchronized(module: nn.SyncBatchNorm) -> Iterator[None]:
    had = vars(module).get("forward")
    vars(module)["forward"] = partial(_local_batch_norm, module)
    try:
        yield
    finally:
        del vars(module)["forward"]
        if had is not None:
            vars(module)["forward"] = had


def _local_batch_norm(module: nn.SyncBatchNorm, value: Tensor) -> Tensor:
    return torch.nn.modules.batchnorm._BatchNorm.forward(module, value)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Whatever the reducer would do."""
