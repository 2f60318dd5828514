"""Predicted times of kernels and of whole paths, with no GPU: `predict` and `predict_profile`.

A prediction is never a measurement: it says ``predicted`` wherever it is shown. docs/prediction.md holds the formula,
the constants and how far they are off on published curves.
"""

from .constants import CONSTANTS, Constants
from .dense import dense
from .model import occupancy, predict_profile
from .paths import PATHS, predict, profile
from .profile import Prediction, Profile
from .search import Fastest, fastest

__all__ = [
    "CONSTANTS",
    "PATHS",
    "Constants",
    "Fastest",
    "Prediction",
    "Profile",
    "dense",
    "fastest",
    "occupancy",
    "predict",
    "predict_profile",
    "profile",
]
