"""Wrappers on instances: a module's hook or a strategy's method gets one around it, and loses it again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from pytest_nancapture.step.state.optimizers import with_wrapped

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

    def __getattr__(self, name: str) -> Any:
        """Marks that somebody has left on the method, as learning rate schedulers do on ``step``."""
        if name.startswith("__") or "original" not in vars(self):
            raise AttributeError(name)
        return getattr(self.original, name)

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

    def original(self, owner: Any, name: str) -> Callable[..., Any]:
        """What the last wrapper of ``owner.name`` was put around."""
        ours = (wrapper for wrapper in reversed(self._wrappers) if wrapper.owner is owner and wrapper.name == name)
        wrapper: Wrapper = next(ours)
        return wrapper.original  # type: ignore[no-any-return]

    def put_on_raw_steps(self, strategy: Any, optimizers: Iterable[Any], around: Callable[..., Any]) -> None:
        """Wrap torch's own ``step`` where it is called past Lightning and its hooks.

        Calls to it become ``around(original, optimizer, closure)``, `closure` being None where it has none. So do
        those to the ``step`` of an optimizer that another one wraps, as one whose update has two parts.
        """
        inside: list[None] = []

        def lightnings(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            inside.append(None)
            try:
                return original(*args, **kwargs)
            finally:
                inside.pop()

        def raw(optimizer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if inside:
                return original(*args, **kwargs)
            closure = kwargs.pop("closure", None) if "closure" in kwargs or not args else args[0]
            rest = args[1:]

            def step(closure: Any) -> Any:
                return lightnings(original, *([closure] if closure is not None or rest else []), *rest, **kwargs)

            return around(step, optimizer, closure)

        self.put(strategy, "optimizer_step", lightnings)
        every = {id(each): each for optimizer in optimizers for each in with_wrapped(optimizer)}
        for optimizer in every.values():
            self.put(optimizer, "step", functools.partial(raw, optimizer))

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
