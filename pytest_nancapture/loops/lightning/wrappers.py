"""Wrappers on instances: a module's hook or a strategy's method gets one around it, and loses it again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

Around = Callable[..., Any]
"""Called with the wrapped function and then its arguments."""


class Wrapper:
    """Stands in an instance's attributes for one of its methods.

    A copy of the instance, made while it is in place, gets the plain method instead.
    """

    def __init__(self, owner: Any, name: str, around: Around) -> None:
        self.owner, self.name, self.around = owner, name, around
        self.is_on = True
        self.original = getattr(owner, name)
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.original, *args, **kwargs) if self.is_on else self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self.owner))
        plain = getattr(type(self.owner), self.name)
        return self.original if owner is None else types.MethodType(plain, owner)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


class Wraps:
    """Wrappers that are in place, so that all can be taken off.

    Lightning looks hooks up on the instance, so a wrapper there runs after every callback's hook.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._wrappers: list[Wrapper] = []

    def put(self, owner: Any, name: str, around: Around) -> None:
        """Wrap ``owner.name``: calls to it become ``around(original, *args, **kwargs)``."""
        had = vars(owner).get(name)
        wrapper = Wrapper(owner, name, around)
        vars(owner)[name] = wrapper
        self._wrappers.append(wrapper)

        def undo() -> None:
            wrapper.is_on = False
            if vars(owner).get(name) is wrapper:
                if had is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = had

        self._undo.append(undo)

    def original(self, name: str) -> Callable[..., Any]:
        """What the last wrapper of that name was put around."""
        wrapper: Wrapper = next(wrapper for wrapper in reversed(self._wrappers) if wrapper.name == name)
        return wrapper.original  # type: ignore[no-any-return]

    def put_on_raw_steps(self, strategy: Any, optimizers: Iterable[Any], before: Callable[[Any, bool], None]) -> None:
        """Call ``before(optimizer, has_closure)`` when torch's own ``step`` is called past Lightning and its hooks."""
        inside: list[None] = []

        def lightnings(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            inside.append(None)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        def hook(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not inside:
                before(optimizer, any(callable(value) for value in (*args[1:], *kwargs.values())))

        self.put(strategy, "optimizer_step", lightnings)
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                self._undo.append(optimizer.register_step_pre_hook(hook).remove)

    def put_after_steps(self, optimizers: Iterable[Any], after: Callable[[Any], None]) -> None:
        """Call ``after(optimizer)`` when torch's own ``step`` is over, whoever called it."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                hook = optimizer.register_step_post_hook(lambda stepped, *_: after(stepped))
                self._undo.append(hook.remove)

    def take_off(self) -> None:
        """Remove all, last one first; one that somebody has wrapped again stays, and does nothing but pass on."""
        while self._undo:
            self._undo.pop()()
        self._wrappers.clear()


def is_inherited(module: Any, name: str) -> bool:
    """Whether the hook is Lightning's own."""
    return str(getattr(type(module), name).__module__).startswith(("lightning.", "pytorch_lightning."))


def last_hook(module: Any) -> str:
    """The last of the module's own hooks that may change gradients before the update."""
    own_clipping = module.automatic_optimization and not is_inherited(module, "configure_gradient_clipping")
    return "configure_gradient_clipping" if own_clipping else "on_before_optimizer_step"
