"""darts: a series with a gap, and a loss of one's own that divides by what it is to predict."""

import dataclasses

import numpy as np
import torch
from darts import TimeSeries
from darts.models import NLinearModel, TiDEModel
from quiet import MENDED, QUIET


class RelativeError(torch.nn.Module):
    """The distance relative to the target, which may be 0."""

    def forward(self, prediction, target):
        size = target.abs().clamp(min=1e-3) if MENDED else target.abs()
        return ((prediction - target).abs() / size).mean()


def fitted(kind, last, callbacks, **options):
    generator = np.random.default_rng(0)
    series = [TimeSeries.from_values(1 + generator.random(14).astype("float32")) for _ in range(4)]
    if last is not None:
        series[-1] = TimeSeries.from_values(last.astype("float32"))
    model = kind(
        input_chunk_length=6,
        output_chunk_length=2,
        n_epochs=2,
        batch_size=7,
        random_state=0,
        pl_trainer_kwargs={"callbacks": callbacks, **QUIET},
        **options,
    )
    model.fit(series)
    return model.model


def default_loss(callbacks, faulty):
    """A series with a gap in it, as resampling leaves them."""
    gap = np.linspace(1, 2, 14)
    gap[7] = np.nan
    return fitted(NLinearModel, gap if faulty else None, callbacks)


def own_loss(callbacks, faulty):
    """A loss of one's own, and a series of zeros, which it predicts to be 0."""
    return fitted(
        TiDEModel,
        np.zeros(14) if faulty else None,
        callbacks,
        loss_fn=RelativeError(),
        hidden_size=4,
        temporal_width_past=2,
        temporal_width_future=2,
        use_reversible_instance_norm=True,
    )


TRAININGS = [default_loss, own_loss]


def mend():
    from darts.models.forecasting.pl_forecasting_module import PLForecastingModule

    original = PLForecastingModule.training_step

    def training_step(self, batch, batch_idx):
        parts = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        known = {name: part.nan_to_num() for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return original(self, dataclasses.replace(batch, **known), batch_idx)

    PLForecastingModule.training_step = training_step
