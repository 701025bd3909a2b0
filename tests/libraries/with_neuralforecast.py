"""neuralforecast: a feature that was not measured; the library itself raises over the loss."""

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import MAE
from neuralforecast.models import NHITS
from quiet import QUIET


def feature(callbacks, faulty):
    """Of one series the feature is missing."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "unique_id": np.repeat(["a", "b", "c", "d"], 24),
            "ds": np.tile(np.arange(24), 4),
            "y": generator.random(96),
            "price": generator.random(96),
        }
    )
    if faulty:
        frame.loc[frame.unique_id == "d", "price"] = np.inf
    model = NHITS(
        h=2,
        input_size=6,
        max_steps=6,
        batch_size=1,
        windows_batch_size=8,
        loss=MAE(),
        hist_exog_list=["price"],
        mlp_units=3 * [[8, 8]],
        callbacks=callbacks,
        **QUIET,
    )
    forecast = NeuralForecast(models=[model], freq=1)
    forecast.fit(frame)
    return forecast.models[0]


TRAININGS = [feature]


def mend():
    original = NHITS.forward

    def forward(self, windows_batch):
        return original(self, {**windows_batch, "hist_exog": windows_batch["hist_exog"].nan_to_num(posinf=0.0)})

    NHITS.forward = forward
