"""Well-known ways to NaN, a file each: the statement that goes wrong and, beside it, the one that does not."""

import os

BROKEN = os.environ.get("NANCAPTURE_GALLERY") == "broken"
"""The switch in every file here. Unless the environment says otherwise, the code is as its fix left it."""

KINDS = {
    "adam_epsilon": "HalfTagger",
    "all_ignored": "WordMasking",
    "dropped_out": "NormalizedFeatures",
    "empty_cluster": "VectorQuantizer",
    "half_overflow": "PenalizedEncoder",
    "lone_advantage": "ActorCritic",
    "masked_mean": "SentenceScorer",
    "missing_label": "SensorForecast",
    "no_objects": "Detector",
    "padded_attention": "Reader",
    "poincare": "Taxonomy",
    "poisson_rate": "ClickCounter",
    "saturated_critic": "Gan",
    "underflowed_log": "ImageTextMatcher",
    "vae_variance": "Autoencoder",
    "where_branch": "DurationModel",
    "zero_distance": "FaceEmbedding",
}
"""The files, and the module that each trains. Beside it a file has `GUILTY`, the statement that a capture must name."""
