"""pytorch-forecasting: large counts, an infinite weight, and a loss of one's own that takes a logarithm."""

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Trainer
from pytorch_forecasting import DeepAR, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import EncoderNormalizer
from pytorch_forecasting.metrics import MultiHorizonMetric, PoissonLoss
from quiet import MENDED, QUIET


class LogError(MultiHorizonMetric):
    """The distance of logarithms, which a prediction below 0 has none of."""

    def loss(self, y_pred, target):
        prediction = self.to_prediction(y_pred)
        if MENDED:
            prediction, target = torch.nn.functional.softplus(prediction), target.clamp(min=0)
        return (torch.log(prediction) - torch.log(target + 1)).abs()


def fitted(kind, values, callbacks, **options):
    """Trained on six series of twelve values each, two to a batch."""
    frame = pd.DataFrame(
        {
            "time": np.tile(np.arange(12), len(values)),
            "series": np.repeat([f"s{i}" for i in range(len(values))], 12),
            "value": np.concatenate(values).astype("float32"),
        }
    )
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        min_encoder_length=8,
        max_prediction_length=2,
        min_prediction_length=2,
        time_varying_unknown_reals=["value"],
        target_normalizer=EncoderNormalizer(),
    )
    model = kind.from_dataset(data, **options)
    loader = data.to_dataloader(train=True, batch_size=3, shuffle=False)
    Trainer(max_epochs=1, callbacks=callbacks, **QUIET).fit(model, loader)
    return model


def series(last, scale=1.0):
    generator = np.random.default_rng(0)
    return [*(1 + generator.random(12) for _ in range(5)), last if last is not None else 1 + generator.random(12)]


def transformer(callbacks, faulty):
    """Poisson's loss without the logarithm of the counts: the exponential of a large one is infinite."""
    counts = series(np.linspace(500, 520, 12) if faulty else None)
    return fitted(
        TemporalFusionTransformer,
        counts,
        callbacks,
        loss=PoissonLoss(),
        hidden_size=4,
        hidden_continuous_size=2,
        attention_head_size=1,
        lstm_layers=1,
    )


def recurrent(callbacks, faulty):
    """Numbers whose square is too large for the variance of a series."""
    return fitted(
        DeepAR, series(np.linspace(1e38, 3e38, 12) if faulty else None), callbacks, hidden_size=4, rnn_layers=1
    )


def own_loss(callbacks, faulty):
    """A loss of one's own, given to the constructor."""
    counts = series(np.linspace(-30, -20, 12) if faulty else None)
    return fitted(NHiTS, counts, callbacks, loss=LogError(), hidden_size=8)


TRAININGS = [transformer, recurrent, own_loss]


def mend():
    def loss(self, y_pred, target):
        rate = torch.log1p(MultiHorizonMetric.to_prediction(self, y_pred).abs())
        return torch.nn.functional.poisson_nll_loss(rate, target, log_input=True, reduction="none")

    PoissonLoss.loss = loss
    original = DeepAR.training_step

    def training_step(self, batch, batch_idx):
        return original(self, torch.utils._pytree.tree_map(bounded, batch), batch_idx)

    DeepAR.training_step = training_step


def bounded(part):
    """A tensor of a batch without what is too large."""
    is_number = isinstance(part, torch.Tensor) and part.is_floating_point()
    return part.nan_to_num(nan=0.0).clamp(-1e3, 1e3) if is_number else part
