"""The former home of `load_model`, for `viewer/opened.py`; see `model_loading.py`."""

from dualform.show.model_loading import load_model

__all__ = ["load_model"]
