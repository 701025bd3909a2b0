"""What the ranks of one run have to agree upon. With one rank nothing is sent."""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """All ranks must make the same calls in the same order, or they wait for each other for ever."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.count: int = trainer.world_size
        self.mine: int = trainer.global_rank

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        if self.count == 1:
            return mine
        return bool(self._trainer.strategy.reduce_boolean_decision(mine, all=False))

    def gather(self, mine: int) -> list[int]:
        """Every rank's small number, by rank."""
        if self.count == 1:
            return [mine]
        number = torch.tensor([mine], device=self._trainer.strategy.root_device)
        return [int(value) for value in self._trainer.strategy.all_gather(number).flatten()]

    def wait(self) -> None:
        """Until every rank has come here, so that none ends the run while another still writes."""
        self.any(False)
