"""gluonts: a feature that was not measured, over which torch's distributions raise."""

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from gluonts.torch.model.deepar.lightning_module import DeepARLightningModule
from quiet import QUIET


def deepar(callbacks, faulty):
    generator = np.random.default_rng(0)
    features = [generator.random((1, 40)) for _ in range(4)]
    if faulty:
        features[-1][:] = np.nan
    data = ListDataset(
        [{"start": "2020-01-01", "target": generator.random(40), "feat_dynamic_real": f} for f in features], freq="D"
    )
    estimator = DeepAREstimator(
        freq="D",
        prediction_length=2,
        context_length=6,
        num_layers=1,
        hidden_size=4,
        lags_seq=[1, 2],
        num_feat_dynamic_real=1,
        batch_size=8,
        num_batches_per_epoch=6,
        num_parallel_samples=2,
        trainer_kwargs={
            "max_epochs": 1,
            "callbacks": callbacks,
            **{k: v for k, v in QUIET.items() if k != "enable_checkpointing"},
        },
    )
    np.random.seed(0)
    return estimator.train_model(data).trained_net


TRAININGS = [deepar]


def mend():
    original = DeepARLightningModule.training_step

    def training_step(self, batch, batch_idx):
        return original(self, {name: part.nan_to_num() for name, part in batch.items()}, batch_idx)

    DeepARLightningModule.training_step = training_step
