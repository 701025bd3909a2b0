"""chemprop: a batch of molecules of which nothing was measured, so that the loss is 0 / 0."""

import numpy as np
from chemprop import data, models, nn
from lightning.pytorch import Trainer
from quiet import QUIET

SMILES = ["CCO", "CCN", "CCC", "CCCl", "c1ccccc1", "CC(=O)O", "CCOC", "CNC", "CCCC", "CCS", "CC=C", "OCCO"]


def regression(callbacks, faulty):
    """The last batch has no target at all."""
    targets = np.linspace(-1, 1, len(SMILES))[:, None]
    if faulty:
        targets[-4:] = np.nan
    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(SMILES, targets, strict=True)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=8)
    )
    Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(model, loader)
    return model


TRAININGS = [regression]


def mend():
    def compute(self):
        return self.total_loss / self.num_samples.clamp(min=1)

    nn.metrics.ChempropMetric.compute = compute
