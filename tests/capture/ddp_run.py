"""A run on several ranks, started by the tests in a process of its own, and by Lightning once more for each further rank."""

import argparse
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from pytest_nancapture import NaNCapture

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--guilty", type=int, default=1)
parser.add_argument("--on-capture", default="raise")
parser.add_argument("--fault", choices=["loss", "gradient", "loss_only", "buffer", "late_buffer", "none"], default="gradient")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--unused", action="store_true")
parser.add_argument("--sync-batchnorm", action="store_true")
parser.add_argument("--break-writing", action="store_true")


class Net(pl.LightningModule):
    def __init__(self, guilty: int, fault: str, unused: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.spare = nn.Linear(2, 2) if unused else None
        self.register_buffer("average", torch.zeros(1))

    def training_step(self, batch, batch_idx):
        x, zero = batch
        h = self.norm(self.layer(x))
        loss = self.out(h).pow(2).mean()
        fault = self.hparams.fault if self.global_rank == self.hparams.guilty or self.trainer.world_size == 1 else "none"
        if fault == "loss":
            loss = loss * (zero + 1) / (zero + 1) * zero.add(1).log() if False else loss / zero * zero if zero == 0 else loss
        if fault == "gradient" and zero == 0:
            loss = loss + (self.out.bias * zero).abs().sqrt().sum()
        if fault == "loss_only" and zero == 0:
            loss = loss + torch.tensor(float("inf"))
        if fault == "buffer":
            self.average.copy_(1 / zero.reshape(1))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        mine = self.global_rank == self.hparams.guilty
        if self.hparams.fault == "late_buffer" and mine:
            self.average.copy_(1 / batch[1].reshape(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if options.break_writing:
        from pytest_nancapture.capture import export

        def refuse(*args, **kwargs):
            raise OSError(28, "No space left on device")

        if int(os.environ.get("LOCAL_RANK", 0)) == options.guilty:
            export.write_bundle = refuse
    batches = [(torch.randn(4, 3), torch.tensor(float(i != 4))) for i in range(8)]
    module = Net(options.guilty, options.fault, options.unused)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=options.ranks,
        strategy=DDPStrategy(find_unused_parameters=options.unused, process_group_backend="gloo"),
        accumulate_grad_batches=options.accumulate,
        sync_batchnorm=options.sync_batchnorm,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[NaNCapture(options.folder, on_capture=options.on_capture)],
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    state = torch.cat([value.flatten().double() for value in module.state_dict().values()])
    print(f"rank {trainer.global_rank} ended at step {trainer.global_step} finite {bool(state.isfinite().all())}")


if __name__ == "__main__":
    sys.exit(main())
