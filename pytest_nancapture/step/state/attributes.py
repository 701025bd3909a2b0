"""Which attributes of a module may be state: those are taken, with all that they hold, at each window's instant."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn

from pytest_nancapture.bundle.tensors.names import submodules
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.inventory import is_rare
from pytest_nancapture.step.state.objects import Lasting, Objects, is_small

_PLAIN = (bool, int, float, str, type(None))
_OF_COMPILING = ("_compiled_call_impl", "_compiler_ctx", "_orig_mod")
_MANY = 2_000
"""Objects; where there are more, they are looked into at rare windows only, and in between at the root's alone."""

_SMALL = 1_000
"""Values, and kilobytes, that one attribute of a datamodule may hold to be taken at each instant."""


class AttributeWatch:
    """Takes the attributes of the root, and of submodules whose classes are not torch's own, at each instant.

    Of torch's own modules only those are taken that were seen to change. To look through everything before every step
    would cost too much: that is done before the first steps and then ever more rarely.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._module = run, run.module
        self.ignored = frozenset({*vars(nn.Module()), *run.attributes, *_OF_COMPILING})
        self._known = known_things(run)
        self._foreign = run.packages
        self._lasting = Lasting()
        self._first = self._plain()
        self._moving: set[str] = set()
        self._homes: list[nn.Module] = []
        self._marked: list[Tensor] = []
        self._of_data: frozenset[str] = frozenset()
        """Names of the attributes of what gives the data that are small."""
        self._looks = 0
        self._count = 0

    def take(self, *, anew: bool = False) -> Objects:
        """What attributes hold now; `anew`: submodules or parameters are others than before."""
        self._looks += 1
        rare = anew or is_rare(self._looks)
        if rare:
            self._list()
        objects = Objects(self._known, self._foreign, self._lasting)
        for module in self._homes if rare or self._count <= _MANY else self._homes[:1]:
            objects.take_attributes(module, self.ignored)
        for tensor in self._marked:
            objects.take_marks(tensor)
        if self._run.data is not None:
            objects.take_attributes(self._run.data, vars(self._run.data).keys() - self._of_data)
        if rare:
            self._count = objects.count
        return objects

    def _list(self) -> None:
        """Which submodules' attributes to take."""
        self._moving |= {path for path, _ in self.changed()}
        self._known = known_things(self._run)
        self._homes = [
            module for path, module in submodules(self._module) if not _is_torchs_own(module) or path in self._moving
        ]
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())
        self._marked = [tensor for tensor in tensors if vars(tensor)]
        held = vars(self._run.data) if self._run.data is not None else {}
        self._of_data = frozenset(name for name, value in held.items() if is_small(value, _SMALL, self._foreign))

    def changed(self) -> dict[tuple[str, str], Any]:
        """Plain attributes that are not what they were when fit began, by submodule and name."""
        return {key: value for key, value in self._plain().items() if _differs(self._first.get(key, _ABSENT), value)}

    def _plain(self) -> dict[tuple[str, str], Any]:
        ignored = self.ignored
        return {
            (path, name): value
            for path, module in submodules(self._module)
            for name, value in vars(module).items()
            if type(value) in _PLAIN and name not in ignored
        }


def known_things(run: Run) -> dict[int, Any]:
    """What others take and put back, by identity: the loop's objects, optimizers, and the module's own parts."""
    module = run.module
    things = (*run.restores, *run.optimizers, *module.modules(), *module.parameters(), *module.buffers())
    return {id(thing): thing for thing in things}


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


_ABSENT = object()


def _differs(before: Any, now: Any) -> bool:
    return type(before) is not type(now) or not (before == now or (before != before and now != now))  # NaN is NaN
