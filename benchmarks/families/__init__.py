"""A file per family of rows; every file here is imported, and shown in this order, those not listed last."""

ORDER = (
    *("recording", "programs", "disk", "peers", "attention", "totals", "topk", "table1", "sums"),
    *("size", "int8", "memory", "growth", "startup", "blocks", "gpt2", "recurrent", "shares", "replay"),
)
