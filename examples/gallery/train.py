"""Train one of the gallery's modules, or all, for a few steps: with NANCAPTURE_GALLERY=broken each leaves a bundle."""

from __future__ import annotations

import argparse
import importlib
import logging
import warnings
from pathlib import Path
from typing import Any

from faults import KINDS
from lightning.pytorch import LightningModule, Trainer, seed_everything

from pytest_nancapture import NaNCapture, NonFiniteError


def train(kind: str, folder: Path) -> tuple[LightningModule, NonFiniteError | None]:
    """Train one epoch, or up to the fault.

    Args:
        kind: one of `KINDS`.
        folder: for the bundle.

    Returns:
        The module, and what ended the run if something did.
    """
    faulty: Any = importlib.import_module(f"faults.{kind}")
    seed_everything(0, verbose=False)
    module: LightningModule = getattr(faulty, KINDS[kind])()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=getattr(faulty, "ACCUMULATE", 1),
        callbacks=[NaNCapture(folder, optimizer_history=getattr(faulty, "OPTIMIZER_HISTORY", False))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module)
    except NonFiniteError as error:
        return module, error
    return module, None


def main() -> None:
    """Train the named kinds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument(
        "--bundles", metavar="DIR", type=Path, default=Path("nan-bundles"), help="where captures go, a folder for each"
    )
    options = parser.parse_args()
    for kind in options.kinds:
        if kind not in KINDS:
            parser.error(f"expected one of {', '.join(KINDS)}, came {kind!r}")
    # Lightning's hints about hardware and loaders, and torch's about a deviation of one number, are of no use here.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    for kind in options.kinds or KINDS:
        _, error = train(kind, options.bundles / kind)
        print(f"{kind}: {'trained, and all is finite' if error is None else error}", flush=True)


if __name__ == "__main__":
    main()
