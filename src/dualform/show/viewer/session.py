"""The former home of `Session`, for `viewer/opened.py`; see `show/session.py`."""

from dualform.show.session import Session

__all__ = ["Session"]
