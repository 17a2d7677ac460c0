"""How `fully_shard` divides the rows of a parameter among processes."""


def own_rows(rows: int, rank: int, size: int) -> slice:
    """Return which of a parameter's rows one of several processes has.

    >>> [own_rows(7, rank, 3) for rank in range(3)], own_rows(1, 2, 3)
    ([slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)], slice(1, 1, None))
    """
    most = -(-rows // size)  # of a process, as torch.chunk divides
    return slice(min(rows, most * rank), min(rows, most * (rank + 1)))
