"""What a step gets that takes its batches itself, ``training_step(self, dataloader_iter)``: told of each, or played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pytest_nancapture.errors import RebuildError

Fetched = tuple[Any, int, int]
"""A batch, its number, and that of its loader, as Lightning gives them."""


class Told(Iterator[Fetched]):
    """Lightning's own iterator; of each batch that the step takes, somebody is told right after.

    Attributes:
        count: of the batches taken so far.
        is_exhausted: whether one more was asked for than there is.
    """

    def __init__(self, iterator: Any, fetched: Callable[[Any, int, int], None], exhausted: Callable[[], None]) -> None:
        self._iterator = iterator
        self._fetched = fetched
        self._exhausted = exhausted
        self.count = 0
        self.is_exhausted = False

    def __next__(self) -> Fetched:
        try:
            item: Fetched = next(self._iterator)
        except StopIteration:
            self.is_exhausted = True
            self._exhausted()
            raise
        self.count += 1
        self._fetched(*item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Played(Iterator[Fetched]):
    """Gives the step the batches again that it took, in their order; then what came after them."""

    def __init__(self, iterator: Any, items: Iterator[Fetched], *, is_end: bool) -> None:
        """`iterator`: Lightning's own, for all else that the step may ask of it; `is_end`: there was nothing more."""
        self._iterator = iterator
        self._items = items
        self._is_end = is_end

    def __next__(self) -> Fetched:
        for batch, batch_idx, dataloader_idx in self._items:
            fetcher = getattr(self._iterator, "data_fetcher", None)
            if fetcher is not None:  # Lightning's hooks read it there
                fetcher._batch, fetcher._batch_idx, fetcher._dataloader_idx = batch, batch_idx, dataloader_idx
            return batch, batch_idx, dataloader_idx
        if self._is_end:
            raise StopIteration
        raise RebuildError("the step takes more batches from dataloader_iter than it took at capture")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def takes_iterator(trainer: Any) -> bool:
    """Whether the training step of this fit takes its batches itself."""
    return type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher"
