"""A run on two ranks whose second one raises in a step, told by each: ``ddp_raise.py FOLDER HOW watched|not``."""

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from pytest_nancapture import NaNCapture
from pytest_nancapture.capture.proof import prove

prove.FRESH = False  # what starts processes is tested in test_proofs.py


class Net(pl.LightningModule):
    """Its second rank raises at the fourth batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.how = how
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_bad = batch_idx == 3 and (self.global_rank == 1 or self.trainer.world_size == 1)
        value = self.layer(batch).square().mean()
        if self.how == "gathers":
            value = value + self.all_gather(value.detach()).mean()
        if is_bad and self.how != "unrelated":
            value = value * (value.detach() * 0).log().mul(0)
        if is_bad:
            TIMES.setdefault("raised", time.monotonic())
        if is_bad and (self.how == "unrelated" or not value.isfinite()):
            raise KeyError("width is nan")
        return value

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


TIMES: dict[str, float] = {}


def main() -> None:
    """Train, and write down what this rank has seen."""
    folder, how, watched = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "watched"
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[NaNCapture(folder / "bundles")] if watched else [],
    )
    batches = [torch.ones(2, 3) for _ in range(6)]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        trainer.fit(Net(how), torch.utils.data.DataLoader(batches, batch_size=None))
    except Exception as error:
        told = {
            "type": type(error).__name__,
            "args": [str(each) for each in error.args],
            "notes": getattr(error, "__notes__", []),
            "seconds": time.monotonic() - TIMES.get("raised", time.monotonic()),
        }
        (folder / f"{rank}.json").write_text(json.dumps(told), "utf-8")
        os._exit(1)  # as one that dies, and takes nobody along


if __name__ == "__main__":
    main()
