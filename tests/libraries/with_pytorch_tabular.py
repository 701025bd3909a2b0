"""pytorch-tabular: a column that is infinite in one row, as a ratio is whose denominator is 0."""

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig


def embedding(callbacks, faulty):
    generator = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "ratio": generator.random(48),
            "size": generator.random(48),
            "colour": np.tile(["red", "blue"], 24),
            "price": generator.random(48),
        }
    )
    if faulty:
        table.loc[40, "price"] = np.nan
    model = TabularModel(
        data_config=DataConfig(target=["price"], continuous_cols=["ratio", "size"], categorical_cols=["colour"]),
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="8-4"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            max_epochs=2,
            batch_size=8,
            accelerator="cpu",
            checkpoints=None,
            early_stopping=None,
            load_best=False,
            progress_bar="none",
            trainer_kwargs={"enable_model_summary": False},
        ),
        verbose=False,
        suppress_lightning_logger=True,
    )
    model.fit(train=table, validation=table[:8], callbacks=callbacks)
    return model.model


TRAININGS = [embedding]


def mend():
    from pytorch_tabular.models.base_model import BaseModel

    original = BaseModel.calculate_loss

    def calculate_loss(self, output, y, tag, *args, **kwargs):
        return original(self, output, y.nan_to_num(), tag, *args, **kwargs)

    BaseModel.calculate_loss = calculate_loss
