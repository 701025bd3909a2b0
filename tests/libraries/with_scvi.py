"""scvi-tools: cells that are no counts, and a cell whose counts are too large for their sum."""

import numpy as np
import scvi
from anndata import AnnData
from quiet import QUIET
from scvi.module import VAE


def fitted(counts, callbacks, **options):
    data = AnnData(counts.astype("float32"))
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=8, n_latent=2, **options)
    model.train(
        max_epochs=2,
        batch_size=16,
        train_size=1.0,
        shuffle_set_split=False,
        callbacks=callbacks,
        **QUIET,
    )
    return model.module


def counts():
    return np.random.default_rng(0).poisson(2.0, (48, 6)).astype("float64") + 1


def raising(callbacks, faulty):
    """Scaled values in place of counts: their logarithm is NaN, and torch's distributions refuse it."""
    cells = counts()
    if faulty:
        cells[40] = -2.5
    return fitted(cells, callbacks)


def plain(callbacks, faulty):
    """The sum of a cell's counts is infinite, and the loss is NaN."""
    cells = counts()
    if faulty:
        cells[40] = 3e38
    return fitted(cells, callbacks, gene_likelihood="nb")


TRAININGS = [raising, plain]


def mend():
    original = VAE._get_inference_input

    def inputs(self, tensors, *args, **kwargs):
        return original(self, {**tensors, "X": tensors["X"].clamp(0, 1e6)}, *args, **kwargs)

    VAE._get_inference_input = inputs
    loss = VAE.loss

    def guarded(self, tensors, *args, **kwargs):
        return loss(self, {**tensors, "X": tensors["X"].clamp(0, 1e6)}, *args, **kwargs)

    VAE.loss = guarded
