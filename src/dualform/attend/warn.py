"""Kinds of warnings that answers come with, so that a program can tell them apart."""


class MaskWarning(UserWarning):
    """A mask cannot be decided for some patterns, because they have no value in its columns."""


class OtherModelWarning(UserWarning):
    """A question was asked with a model that is not the recorded one."""
