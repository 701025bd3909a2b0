"""What an exception is over: which bad values did the host look at, or an operation refuse, just before it was raised?

Code that raises over NaN has read it, be it a value (``loss.item()``, ``.numpy()``) or what a comparison made of it
(``isnan(loss).any()``). The latter holds nothing bad itself, so it is followed from there to where the host reads it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import CodeType, FrameType, TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_BY_OTHERS = ("numpy", "tolist", "__array__", "__dlpack__")
"""Methods by which others than torch come to read a tensor; no operation of torch's tells of them."""

_ENGINE = torch.autograd.graph.__file__
_NO_GRAPH = "does not require grad"

O = TypeVar("O")  # noqa: E741, an origin


@dataclass(frozen=True, eq=False)
class Suspect(Generic[O]):
    """A bad value, or what was made of one.

    Attributes:
        origin: where it came from.
        nan: whether NaN was among it; else only Inf.
        is_value: whether it is bad itself; else it was computed of what is, as a comparison.
        is_learned: whether weights took part in it, so that it is no mark for what is missing in the data.
    """

    origin: O
    nan: bool
    is_value: bool
    is_learned: bool = False


@dataclass(frozen=True, eq=False)
class _Read(Generic[O]):
    suspect: Suspect[O]
    count: int
    codes: frozenset[CodeType]


class Reads(Generic[O]):
    """Follows hints at bad values, and remembers what the host read of them."""

    def __init__(self) -> None:
        self._hints: dict[int, Suspect[O]] = {}
        self._count = 0
        self._last: _Read[O] | None = None
        self._all: list[_Read[O]] = []
        self._refused: tuple[BaseException, Sequence[Suspect[O]]] | None = None

    def hint(self, memory: int) -> Suspect[O] | None:
        """What the values in this memory hint at."""
        return self._hints.get(memory)

    def operation(self, suspects: Sequence[Suspect[O]], outputs: Iterable[tuple[Tensor, int, bool]]) -> None:
        """An operation that is no look of the host's has made tensors.

        Args:
            suspects: what it was given.
            outputs: each with its memory, and whether it is bad itself.
        """
        self._count += 1
        is_healed = any(suspect.is_value for suspect in suspects)
        for tensor, memory, is_bad in outputs:
            is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
            if suspects and not (is_bad or (is_number and is_healed)):
                first = next((suspect for suspect in suspects if suspect.is_learned), suspects[0])
                self._hints[memory] = dataclasses.replace(first, is_value=False)
            else:
                self._hints.pop(memory, None)

    def read(self, suspects: Sequence[Suspect[O]]) -> None:
        """The host reads something: a number, whether all is well ..."""
        self._last = _Read(suspects[0], self._count, _codes(sys._getframe(1))) if suspects else None
        if self._last is not None:
            self._all.append(self._last)

    def refused(self, error: BaseException, suspects: Sequence[Suspect[O]]) -> None:
        """An operation raised, given these."""
        self._refused = (error, suspects)

    def behind(self, error: BaseException, is_born: Callable[[O], bool]) -> list[Suspect[O]]:
        """What `error` is over; empty where it has nothing to do with bad values, as far as anybody can tell.

        Args:
            is_born: whether bad values were born on the way to an origin; else they were given to the step, where
                missing values may be marked by NaN and looked for as a matter of course.
        """
        chain = list(_chain(error))
        if self._refused is not None and self._refused[0] in chain and self._refused[1]:
            return list(self._refused[1])
        last = self._last
        if last is not None and (last.count == self._count or last.suspect.is_learned or is_born(last.suspect.origin)):
            return [last.suspect]
        raising = _raising(error.__traceback__)
        if raising is not None and raising.co_filename == _ENGINE and _NO_GRAPH in str(error):
            # The code has put a constant in the place of a loss that it has seen to be bad.
            return [read.suspect for read in self._all if read.suspect.is_learned][-1:]
        values = [read for read in self._all if read.suspect.is_value and raising in read.codes]
        return [read.suspect for read in values if is_born(read.suspect.origin)][-1:]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, and those that it came of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _raising(traceback: TracebackType | None) -> CodeType | None:
    """The code that raised."""
    code = None
    while traceback is not None:
        code, traceback = traceback.tb_frame.f_code, traceback.tb_next
    return code


def _codes(frame: FrameType | None) -> frozenset[CodeType]:
    codes = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return frozenset(codes)


@contextmanager
def seen_by_others(read: Callable[[Tensor], None]) -> Iterator[None]:
    """Have `read` called with each tensor that is handed to others than torch."""
    with ExitStack() as stack:
        for name in _BY_OTHERS:
            had = vars(Tensor).get(name)
            _put(stack, name, had, _telling(getattr(Tensor, name), read))
        yield


@contextmanager
def unseen_in_texts(paused: Callable[[], Any]) -> Iterator[None]:
    """Around a run: what is done to print a tensor, as for a message, is none of the step's."""
    module: Any = torch._tensor_str
    original = module._str

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return original(*args, **kwargs)

    module._str = quiet
    try:
        yield
    finally:
        module._str = original


def _telling(original: Callable[..., Any], read: Callable[[Tensor], None]) -> Callable[..., Any]:
    @wraps(original)
    def told(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        read(tensor)
        return original(tensor, *args, **kwargs)

    return told


def _put(stack: ExitStack, name: str, had: Any, instead: Any) -> None:
    """Put a method in place on the class of tensors, and take it off on leaving."""
    if had is None:
        stack.callback(delattr, Tensor, name)
    else:
        stack.callback(setattr, Tensor, name, had)
    setattr(Tensor, name, instead)
