"""Train until a batch lacks a class, with NaNCapture watching."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from typing import Any

from data import RandomImageData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from model import Classifier

from pytest_nancapture import NaNCapture, NonFiniteError


class PrintLoss(Callback):
    """Prints one line every `every` steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The loss is read here, which waits for the device: hence not at every step of a long run."""
        if batch_idx % self.every == 0:
            print(f"step {batch_idx:3d}   loss {outputs['loss'].item():7.2f}", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="the article's size: 224x224, 800 steps, a GPU if there is one"
    )
    parser.add_argument("--steps", type=int, help="length of the run (default: 20, with --full 800)")
    parser.add_argument(
        "--bundles", metavar="DIR", default="nan-bundles", help="where captures go (default: %(default)s)"
    )
    parser.add_argument(
        "--on-capture",
        choices=("raise", "stop", "skip"),
        default="raise",
        help="after a capture: end with an error, end quietly, or leave the step out and go on (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    """Train once."""
    options = parse_options()
    # Lightning's hints about hardware and loggers are of no use here.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    seed_everything(0, verbose=False)

    data = RandomImageData(
        steps=options.steps or (800 if options.full else 20),
        image_size=224 if options.full else 32,
        workers=os.cpu_count() or 1 if options.full else 0,
    )
    trainer = Trainer(
        accelerator="auto" if options.full else "cpu",
        devices=1,
        max_epochs=1,
        callbacks=[
            PrintLoss(every=10 if options.full else 1),
            NaNCapture(options.bundles, on_capture=options.on_capture),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Classifier(), data)
    except NonFiniteError as error:
        # Only for brevity: uncaught, it ends the run too, below a long traceback.
        sys.exit(f"NonFiniteError: {error}")


if __name__ == "__main__":
    main()
