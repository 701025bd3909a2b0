"""chemprop: molecules of which nothing was measured, so that the loss is 0 / 0, and a target that is too large."""

import numpy as np
from chemprop import data, models, nn
from lightning.pytorch import Trainer
from quiet import QUIET

SMILES = ["CCO", "CCN", "CCC", "CCCl", "c1ccccc1", "CC(=O)O", "CCOC", "CNC", "CCCC", "CCS", "CC=C", "OCCO"]


def fitted(targets, callbacks):
    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(SMILES, targets[:, None], strict=True)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=8)
    )
    Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(model, loader)
    return model


def unmeasured(callbacks, faulty):
    """The last batch has no target at all."""
    targets = np.linspace(-1, 1, len(SMILES))
    targets[-4:] = np.nan if faulty else targets[-4:]
    return fitted(targets, callbacks)


def overflow(callbacks, faulty):
    """One target is so large that its square is infinite."""
    targets = np.linspace(-1, 1, len(SMILES))
    targets[-2] = 1e20 if faulty else targets[-2]
    return fitted(targets, callbacks)


TRAININGS = [unmeasured, overflow]


def mend():
    def compute(self):
        return self.total_loss / self.num_samples.clamp(min=1)

    nn.metrics.ChempropMetric.compute = compute
    original = nn.metrics.MSE._calc_unreduced_loss

    def unreduced(self, preds, targets, *args):
        return original(self, preds, targets.clamp(-1e3, 1e3), *args)

    nn.metrics.MSE._calc_unreduced_loss = unreduced
