"""Runs on several ranks, started by the tests in a process of their own, and by Lightning in one more for each rank."""

import errno
import hashlib
import json
import logging
import os
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from pytest_nancapture import NaNCapture, NonFiniteError
from pytest_nancapture.capture import export
from pytest_nancapture.capture.proof import prove

prove.FRESH = False  # what starts processes is tested in test_proofs.py


class Net(pl.LightningModule):
    """Goes bad on one rank, or in a replay on the only one, where the batch's second part is 0."""

    def __init__(self, guilty: int, fault: str, *, unused: bool = False, manual: str = "", accumulate: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.spare = nn.Linear(2, 2) if unused else None
        self.rival = nn.Linear(3, 1) if manual == "adversarial" else None
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        getattr(self, self.hparams.manual)(batch, batch_idx)
        return None

    def single(self, batch: Any, batch_idx: int) -> None:
        """One optimizer, with Lightning's wrapper around it."""
        self.manual_backward(self.loss(batch) / self.hparams.accumulate)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def raw(self, batch: Any, batch_idx: int) -> None:
        """One optimizer, torch's own, past Lightning."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.manual_backward(self.loss(batch) / self.hparams.accumulate)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

    def adversarial(self, batch: Any, batch_idx: int) -> None:
        """Two optimizers and two losses; the first update is good, the second bad. It needs unused parameters."""
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        self.manual_backward(self.rival(batch[0]).pow(2).mean())
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        self.manual_backward((self.loss(batch) + self.rival(batch[0]).mean()) / self.hparams.accumulate)
        if (batch_idx + 1) % self.hparams.accumulate == 0:
            first.step()
            first.zero_grad()
        self.untoggle_optimizer(first)

    def switching(self, batch: Any, batch_idx: int) -> None:
        """Speaks to the other ranks in the last of two backward passes only, and sees to that by itself."""
        model = self.trainer.strategy.model
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if self.trainer.world_size > 1:
            model.require_backward_grad_sync = False
        self.manual_backward(self.loss(batch) / 2)
        if self.trainer.world_size > 1:
            model.require_backward_grad_sync = True
        self.manual_backward(self.loss(batch) / 2)
        optimizer.step()

    def loss(self, batch: Any) -> torch.Tensor:
        x, good = batch
        if self.hparams.fault == "varying":
            return self.varying(x, good)
        if self.hparams.fault.startswith("shared"):
            return self.shared(x, good)
        loss = self.out(self.norm(self.layer(x))).pow(2).mean()
        if self.fault == "loss":
            loss = loss * (good / good)
        elif self.fault == "gradient":
            loss = loss + (self.out.bias * good).abs().sqrt().sum()
        elif self.fault == "loss_only":
            loss = loss + good.reciprocal()
        elif self.fault == "buffer":
            self.average.copy_(good.reciprocal())
        return loss

    def varying(self, x: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
        """Leaves out a layer in every step but the bad one."""
        loss = self.out(self.layer(x)).pow(2).mean() * (good / good if self.fault == "varying" else 1)
        return loss if good else loss + self.spare(x[:, :2]).pow(2).mean()

    def shared(self, x: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
        """Speaks to the other ranks by itself, so that one rank's bad values become everybody's."""
        mine = self.norm(self.layer(x))
        if self.fault == "shared_forward":
            mine = mine * (good / good)
        if self.hparams.fault == "shared_count":  # in training the count is 0 on no rank, and it is all of theirs
            count = torch.ones(()) * float(self.global_rank > 0 or self.trainer.world_size == 1)
            torch.distributed.all_reduce(count) if self.trainer.world_size > 1 else None
            mine = mine / count
        all_of_them = self.all_gather(mine, sync_grads=True).reshape(-1, 4)
        loss = (self.out(mine) @ self.out(all_of_them).T).logsumexp(1).mean()
        if self.fault == "shared_backward":
            loss = loss + (mine * good).abs().sqrt().sum()
        if self.fault == "shared_count":
            loss = loss * (good / good)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.fault == "late_buffer":
            self.average.copy_(batch[1].reciprocal())

    @property
    def fault(self) -> str:
        """Which is to come on this rank."""
        mine = self.global_rank == self.hparams.guilty or self.trainer.world_size == 1
        return self.hparams.fault if mine else "none"

    def configure_optimizers(self) -> Any:
        if self.rival is None:
            return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)]
        rivals = set(self.rival.parameters())
        mine = [parameter for parameter in self.parameters() if parameter not in rivals]
        return [torch.optim.Adam(mine, lr=0.01), torch.optim.SGD(rivals, lr=0.1)]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def halve(state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: averages gradients with half their bits."""
    return default_hooks.fp16_compress_hook(None, bucket)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train(scenario: dict[str, Any], ranks: int, folder: str) -> pl.Trainer:
    """One run. All ranks must come here with the same scenario."""
    torch.manual_seed(0)
    rank, bad = int(os.environ.get("LOCAL_RANK", "0")), scenario.get("bad", 4)
    guilty = scenario.get("guilty", 1)
    export.write_bundle = refuse if scenario.get("break_writing") and rank == guilty else WRITE_BUNDLE
    generator = torch.Generator().manual_seed(rank)
    manual, accumulate = scenario.get("manual", ""), scenario.get("accumulate", 1)
    batches = [(torch.randn(4, 3, generator=generator), torch.tensor(float(i != bad))) for i in range(8)]
    if scenario.get("missing"):
        first = bad - bad % accumulate
        del batches[first : first + accumulate]
    capture = NaNCapture(folder, on_capture=scenario.get("on_capture", "raise"), confirm=scenario.get("confirm", 1))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(
            find_unused_parameters=scenario.get("unused", False) or manual == "adversarial",
            process_group_backend="gloo",
            static_graph=scenario.get("static", False),
            gradient_as_bucket_view=scenario.get("views", False),
            ddp_comm_hook=halve if scenario.get("hook") else None,
        ),
        accumulate_grad_batches=1 if manual else accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[capture],
    )
    module = Net(
        guilty,
        scenario.get("fault", "gradient"),
        unused=scenario.get("unused", False),
        manual=manual,
        accumulate=accumulate,
    )
    REACHED.update(trainer=trainer, module=module)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer


def told(number: int, lines: Lines, error: NonFiniteError | None) -> str:
    """How a run ended on this rank, a line of JSON."""
    module = REACHED["module"]
    values = list(module.state_dict().values())
    return json.dumps(
        {
            "scenario": number,
            "rank": REACHED["trainer"].global_rank,
            "step": REACHED["trainer"].global_step,
            "finite": all(bool(value.isfinite().all()) for value in values),
            "weights": repr(sum(parameter.detach().double().sum().item() for parameter in module.parameters())),
            "digest": digest(),
            "error": error and str(error),
            "bundle": error and error.bundle,
            "log": lines.seen,
        }
    )


def digest() -> str:
    """Of the optimizers' states and of all weights and buffers, to the bit."""
    states = [optimizer.state_dict()["state"] for optimizer in REACHED["trainer"].optimizers]
    moments = [value for state in states for entry in state.values() for value in entry.values()]
    tensors = [value for value in (*REACHED["module"].state_dict().values(), *moments) if torch.is_tensor(value)]
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def main() -> None:
    """``ddp_run.py FOLDER RANKS SCENARIOS``, the last a JSON list; an error of the last run is not caught."""
    folder, ranks, scenarios = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for number, scenario in enumerate(scenarios):
        lines, error = Lines(), None
        logging.getLogger("pytest_nancapture").addHandler(lines)
        try:
            train(scenario, ranks, f"{folder}/{number}")
        except NonFiniteError as caught:
            if number == len(scenarios) - 1:
                raise
            error = caught
        finally:
            logging.getLogger("pytest_nancapture").removeHandler(lines)
        sys.stdout.write(told(number, lines, error) + "\n")
        sys.stdout.flush()


WRITE_BUNDLE = export.write_bundle
REACHED: dict[str, Any] = {}

if __name__ == "__main__":
    main()
